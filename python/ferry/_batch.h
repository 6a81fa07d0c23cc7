/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of a Python source's items, so that Python is asked once a run and not
 * once a tensor. Plain torch tensors are described here, through torch's
 * DLPack table; whatever is not plain is left to Python's slower look, which
 * also says what is wrong with it.
 * Invariant: what an item points to is kept alive by Python until the next
 * run is asked for, or the pass ends. */
#ifndef FERRY_PY_BATCH_H
#define FERRY_PY_BATCH_H

#define FERRY_PY_BATCH_ITEMS 512

typedef struct ferry_py_batch {
    void *handle; /* of the Python source */
    ferry_item *items;
    size_t count, at;
    uint64_t devices; /* bit n: items of the run lie on CUDA device n */
    bool ready;       /* what those devices had to do for the run is done */
} ferry_py_batch;

/* Python waits for the devices of the run, or answers FERRY_ETIMEOUT. */
static ferry_status ferry_py_source_wait(void *self, int64_t timeout_ms);

/* The event of every item of a device. */
static ferry_status ferry_py_batch_wait(void *self, int64_t timeout_ms)
{
    ferry_py_batch *batch = self;

    return batch->ready ? FERRY_OK : ferry_py_source_wait(self, timeout_ms);
}

/* Gives an item its event, or none, by where its tensor lies. */
static void ferry_py_batch_event(ferry_py_batch *batch, ferry_item *item)
{
    int32_t device = item->tensor.device;

    item->wait = device > 0 ? ferry_py_batch_wait : NULL;
    item->wait_arg = device > 0 ? batch : NULL;
    if (device > 0 && device <= 64)
        batch->devices |= (uint64_t)1 << (device - 1);
}

/* Python fills the next run, or answers FERRY_DONE or a failure. */
static ferry_status ferry_py_source_refill(void *self);

static ferry_status ferry_py_batch_next(void *self, ferry_item *out_item)
{
    ferry_py_batch *batch = self;

    while (batch->at == batch->count) {
        ferry_status status;

        batch->at = batch->count = 0;
        status = ferry_py_source_refill(self);
        if (status != FERRY_OK)
            return status;
    }
    *out_item = batch->items[batch->at++];
    return FERRY_OK;
}

/* ---- torch's table, as DLPack 1.x lays it out ---- */

typedef struct ferry_py_dltensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} ferry_py_dltensor;

typedef struct ferry_py_dlpack {
    uint32_t major, minor;
    struct ferry_py_dlpack *prev;
    void *allocate, *managed_from, *managed_to;
    int (*tensor_from)(void *object, ferry_py_dltensor *out);
    void *current_stream;
} ferry_py_dlpack;

/* What is known of torch once it is there. Written and read with the
 * interpreter lock held. */
static struct {
    const ferry_py_dlpack *table;
    PyObject *tensor, *parameter; /* the two types that are plain */
    PyObject *is_neg;
} ferry_py_torch;

/* Takes torch.Tensor and torch.nn.Parameter by address. Answers whether their
 * tensors can be described here. */
static bool ferry_py_batch_torch(uintptr_t tensor, uintptr_t parameter)
{
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *type = (PyObject *)tensor;
    PyObject *capsule =
        PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const ferry_py_dlpack *table =
        capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;

    while (table != NULL && table->major > 1)
        table = table->prev;
    if (table != NULL && table->major == 1 && table->tensor_from != NULL &&
        ferry_py_torch.table == NULL) {
        ferry_py_torch.is_neg = PyObject_GetAttrString(type, "is_neg");
        ferry_py_torch.tensor = type;
        ferry_py_torch.parameter = (PyObject *)parameter;
        Py_INCREF(type);
        Py_INCREF(ferry_py_torch.parameter);
        ferry_py_torch.table = table; /* a static of torch's */
    }
    PyErr_Clear();
    Py_XDECREF(capsule);
    PyGILState_Release(lock);
    return ferry_py_torch.table != NULL;
}

static int ferry_py_dtype(const ferry_py_dltensor *from)
{
    static const struct {
        uint8_t code, bits;
        int dtype;
    } known[] = {
        {4, 16, FERRY_DTYPE_BF16},    {2, 32, FERRY_DTYPE_F32},
        {2, 16, FERRY_DTYPE_F16},     {2, 64, FERRY_DTYPE_F64},
        {10, 8, FERRY_DTYPE_F8_E4M3}, {12, 8, FERRY_DTYPE_F8_E5M2},
        {1, 8, FERRY_DTYPE_U8},       {0, 8, FERRY_DTYPE_I8},
        {0, 16, FERRY_DTYPE_I16},     {0, 32, FERRY_DTYPE_I32},
        {0, 64, FERRY_DTYPE_I64},     {1, 16, FERRY_DTYPE_U16},
        {1, 32, FERRY_DTYPE_U32},     {1, 64, FERRY_DTYPE_U64},
        {6, 8, FERRY_DTYPE_BOOL},
    };

    if (from->lanes != 1)
        return 0;
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i].code == from->code && known[i].bits == from->bits)
            return known[i].dtype;
    }
    return 0;
}

/* Describes a tensor of one of the plain types; false where it lies elsewhere
 * than on the host or CUDA, or has no strides, or a dtype that does not
 * travel. */
static bool ferry_py_describe(PyObject *tensor, ferry_tensor *out)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    ferry_py_dltensor from;
    bool empty = false;

    if ((type != ferry_py_torch.tensor && type != ferry_py_torch.parameter) ||
        ferry_py_torch.table->tensor_from(tensor, &from) != 0)
        return false;
    memset(out, 0, sizeof(*out));
    out->dtype = (ferry_dtype)ferry_py_dtype(&from);
    /* The host, or CUDA. */
    if ((from.device_type != 1 && from.device_type != 2) || out->dtype == 0 ||
        from.ndim < 0 || from.ndim > FERRY_MAX_DIMS ||
        (from.ndim > 0 && (from.shape == NULL || from.strides == NULL)))
        return false;
    out->device = from.device_type == 2 ? 1 + from.device_id : 0;
    out->ndim = from.ndim;
    for (int32_t d = 0; d < from.ndim; d++) {
        out->shape[d] = from.shape[d];
        out->stride[d] = from.strides[d];
        empty = empty || from.shape[d] == 0;
    }
    out->data = from.data ? (char *)from.data + from.byte_offset : NULL;
    return out->data != NULL || empty;
}

/* Whether the bytes are the values: no lazy minus sign. */
static bool ferry_py_is_literal(PyObject *tensor)
{
    PyObject *neg =
        PyObject_CallFunctionObjArgs(ferry_py_torch.is_neg, tensor, NULL);
    bool literal = neg == Py_False;

    Py_XDECREF(neg);
    return literal;
}

/* The text lives as long as the string object. */
static const char *ferry_py_name(PyObject *name)
{
    Py_ssize_t size = 0;
    const char *text =
        PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &size) : NULL;

    return text != NULL && strlen(text) == (size_t)size ? text : NULL;
}

/* Fills items [from, count) from two lists, by address, and answers the
 * index of the first item that is not plain; count when all are. */
static size_t ferry_py_batch_fill(ferry_py_batch *batch, uintptr_t names,
                                  uintptr_t tensors, size_t from, size_t count)
{
    PyGILState_STATE lock;
    size_t i = from;

    if (ferry_py_torch.table == NULL)
        return from;
    lock = PyGILState_Ensure();
    for (; i < count; i++) {
        ferry_item *item = &batch->items[i];
        PyObject *name = PyList_GetItem((PyObject *)names, (Py_ssize_t)i);
        PyObject *tensor = PyList_GetItem((PyObject *)tensors, (Py_ssize_t)i);

        if (name == NULL || tensor == NULL)
            break;
        item->name = ferry_py_name(name);
        if (item->name == NULL || !ferry_py_describe(tensor, &item->tensor) ||
            !ferry_py_is_literal(tensor))
            break;
        ferry_py_batch_event(batch, item);
    }
    PyErr_Clear();
    PyGILState_Release(lock);
    return i;
}

#endif
