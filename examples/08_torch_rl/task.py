# SPDX-License-Identifier: Apache-2.0
"""What is to be learned: given three digits, say them in ascending order.

    prompt  BEGIN d d d THEN        answer  d d d END

Every place of the answer that is right earns a quarter. Chance earns 1/16.
"""

from __future__ import annotations

import torch

BEGIN, THEN, END = 10, 11, 12
DIGITS = 3
PROMPT, ANSWER = DIGITS + 2, DIGITS + 1
VOCABULARY = 16


def prompts(count: int, random: torch.Generator) -> list[list[int]]:
    """Draw prompts."""
    digits = torch.randint(0, 10, (count, DIGITS), generator=random)
    return [[BEGIN, *row, THEN] for row in digits.tolist()]


def rewards(prompt: list[int], answer: list[int]) -> list[float]:
    """Return what each place of an answer earns."""
    right = [*sorted(prompt[1:-1]), END]
    return [float(i < len(answer) and answer[i] == token) / ANSWER
            for i, token in enumerate(right)]
