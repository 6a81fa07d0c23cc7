/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary frequencies as Hugging Face computes them. */
#include "model/model_config_parts.h"

#include <math.h>

double ferry__rope_freq_factor(const ferry__model_config *config, int64_t pair)
{
    double freq, turns, kept;

    if (config->rope_factor == 0)
        return 1.0;
    freq =
        pow(config->rope_theta, -2.0 * (double)pair / (double)config->head_dim);
    /* Turns over the original length decide: fast pairs stay as they are,
     * slow ones are stretched, the rest lie between. */
    turns = (double)config->rope_original_positions * freq / (2.0 * M_PI);
    kept = (turns - config->rope_low_freq) /
           (config->rope_high_freq - config->rope_low_freq);
    kept = fmin(fmax(kept, 0.0), 1.0);
    return 1.0 / (kept + (1.0 - kept) / config->rope_factor);
}
