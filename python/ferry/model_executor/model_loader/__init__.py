# SPDX-License-Identifier: Apache-2.0
"""Import paths of vLLM below which the reload functions lie."""
