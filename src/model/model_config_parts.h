/* SPDX-License-Identifier: Apache-2.0 */
/* The readers of each form of a config, and what they share.
 * Invariant: a reader fills every field; ferry__config_validate then bounds
 * them, so that later products fit. */
#ifndef FERRY_MODEL_MODEL_CONFIG_PARTS_H
#define FERRY_MODEL_MODEL_CONFIG_PARTS_H

#include "model/model_config.h"

/* `path` is config.json itself, or the GGUF. */
ferry_status ferry__config_from_json(const char *path,
                                     ferry__model_config *config);
ferry_status ferry__config_from_gguf(const char *path,
                                     ferry__model_config *config);
/* By Hugging Face's class name, or by GGUF's; FERRY_ENOTSUP names it. */
ferry_status ferry__arch_find(const char *name, bool gguf, ferry__arch *out);
/* Adds an end token once; ids out of range are left out. */
void ferry__config_add_eos(ferry__model_config *config, int64_t id);
ferry_status ferry__config_validate(const ferry__model_config *config);
/* Base frequency over scaled frequency of rotary pair `pair`: what llama3
 * scaling divides angles by; 1 without scaling. */
double ferry__rope_freq_factor(const ferry__model_config *config, int64_t pair);

#endif
