/* SPDX-License-Identifier: Apache-2.0 */
/* Shared objects opened on first use. Invariant: a module is opened once and
 * never closed; a failure is reported each time and changes nothing. */
#ifndef FERRY_CORE_MODULE_H
#define FERRY_CORE_MODULE_H

#include <ferry/status.h>
#include <stdbool.h>

/* Folder of Ferry's own modules: setting `module_path`, else "ferry" beside
 * libferry. */
ferry_status ferry__module_folder(char *out, size_t size_bytes);
/* "ferry_ipc_worker" -> full path of its file in the folder. */
ferry_status ferry__module_path(const char *module, char *out,
                                size_t size_bytes);
bool ferry__module_present(const char *module);
/* Opens `library` (a path, or a bare module name of ours) and looks `symbol`
 * up. FERRY_EBACKEND: missing file or symbol, naming both. */
ferry_status ferry__module_symbol(const char *library, const char *symbol,
                                  void **out_symbol);

#endif
