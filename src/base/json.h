/* SPDX-License-Identifier: Apache-2.0 */
/* JSON from outside, read strictly; info structs described by tables.
 * Invariant: repeated keys, NaN, infinities, depth beyond 64 and texts beyond
 * the limit never get past ferry__json_parse. */
#ifndef FERRY_BASE_JSON_H
#define FERRY_BASE_JSON_H

#include <ferry/backend.h>
#include <jansson.h>

#define FERRY__JSON_DEPTH_MAX 64
#define FERRY__JSON_BYTES_MAX ((size_t)256 << 20)

/* Parses one JSON value that fills the whole text. `what` names it in errors
 * ("update info"). FERRY_EINVAL gives line, column and reason. */
ferry_status ferry__json_parse(const char *what, const char *text,
                               size_t length, json_t **out_value);

/* As ferry_info_parse, from a parsed object (borrowed). */
ferry_status ferry__info_from_json(const ferry_info_type *type,
                                   const json_t *object, void **out_info);

#endif
