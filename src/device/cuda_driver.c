/* SPDX-License-Identifier: Apache-2.0 */
/* Binding the CUDA driver. A failure is found again at each call, so that
 * its reason is told each time; a success is kept. */
#include "device/cuda_driver.h"

#include "base/config.h"
#include "core/module.h"

#include <pthread.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ferry__cuda driver;
static bool bound;

static ferry_status find(const char *library, const char *name, void *out)
{
    void *symbol;

    FERRY_TRY(ferry__module_symbol(library, name, &symbol));
    memcpy(out, &symbol, sizeof(symbol));
    return FERRY_OK;
}

static ferry_status bind_all(ferry__cuda *c)
{
    const char *library = ferry__config_get(FERRY__CONFIG_CUDA_LIBRARY);

#define FERRY__CUDA_FIND(name, args) FERRY_TRY(find(library, #name, &c->name));
    FERRY__CUDA_SYMBOLS(FERRY__CUDA_FIND)
#undef FERRY__CUDA_FIND
    return FERRY_OK;
}

static ferry_status start(ferry__cuda *c)
{
    CUresult r = c->cuInit(0);

    if (r == CUDA_SUCCESS)
        r = c->cuDriverGetVersion(&c->version);
    if (r == CUDA_SUCCESS)
        r = c->cuDeviceGetCount(&c->n_devices);
    if (r != CUDA_SUCCESS) {
        ferry__cuda_fail(c, "cuda driver", r);
        return FERRY_EBACKEND;
    }
    if (c->n_devices < 1)
        return ferry_fail(FERRY_EBACKEND, "cuda driver: no device");
    return FERRY_OK;
}

ferry_status ferry__cuda_bind(const ferry__cuda **out)
{
    ferry_status status = FERRY_OK;

    pthread_mutex_lock(&lock);
    if (!bound) {
        ferry__cuda c = {0};

        status = bind_all(&c);
        if (status >= 0)
            status = start(&c);
        if (status >= 0) {
            driver = c;
            bound = true;
        }
    }
    pthread_mutex_unlock(&lock);
    FERRY_TRY(status);
    *out = &driver;
    return FERRY_OK;
}

ferry_status ferry__cuda_fail(const ferry__cuda *cuda, const char *what,
                              CUresult result)
{
    const char *name = NULL, *text = NULL;

    cuda->cuGetErrorName(result, &name);
    cuda->cuGetErrorString(result, &text);
    return ferry_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? FERRY_ENOMEM
                                                         : FERRY_EIO,
                      "%s: %s %d (%s)", what, name ? name : "error",
                      (int)result, text ? text : "unknown");
}

int32_t ferry__cuda_current(const ferry__cuda *cuda)
{
    CUdevice device = 0;

    return cuda->cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : 0;
}

bool ferry__cuda_owns(const ferry__cuda *cuda, const void *memory)
{
    unsigned int type = 0;

    return cuda->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                       (CUdeviceptr)(uintptr_t)memory) ==
               CUDA_SUCCESS &&
           type == FERRY__CU_MEMORY_DEVICE;
}
