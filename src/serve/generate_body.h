/* SPDX-License-Identifier: Apache-2.0 */
/* Reading generation requests and writing their results.
 * One reader and one writer serve /v1/completions and
 * /inference/v1/generate; what differs is where fields stand. */
#ifndef FERRY_SERVE_GENERATE_BODY_H
#define FERRY_SERVE_GENERATE_BODY_H

#include "serve/http.h"

/* Fills sampling, limits and stops from `params`; `prompt`, the body's
 * `field`, holds ids or text. False when a reply was made. */
bool ferry__read_sampling(ferry__exchange *x, json_t *params, const char *where,
                          ferry__request *r);
bool ferry__read_prompt(ferry__exchange *x, json_t *prompt, const char *field,
                        ferry__request *r);
/* Decoded text of the output, up to a stop text. NULL without tokenizer. */
json_t *ferry__write_text(const ferry__request *r);
json_t *ferry__write_stop_reason(const ferry__request *r);
json_t *ferry__write_ids(const int32_t *ids, int32_t n);
/* [{"version", "start", "end"}, …]; null when there is no token. */
json_t *ferry__write_spans(const ferry__request *r);
/* The forms of logprobs of the two routes. */
json_t *ferry__write_logprobs_completion(const ferry__request *r);
json_t *ferry__write_logprobs_chat(const ferry__request *r);
json_t *ferry__write_usage(const ferry__request *r);

#endif
