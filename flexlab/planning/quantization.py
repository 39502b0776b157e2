"""Bits that one weight takes, by what its makers call the quantisation. Pure.

GGUF's K and I types: averages over whole files as llama.cpp's own `quantize` tool lists them for a
Llama 8B. GPTQ and AWQ: 4 bits, and for each group of 128 a scale of 16 bits and a zero of 4; the
ends of the model (embeddings and head) stay in 16 bits. Others: as the format is defined.
"""

from __future__ import annotations

import re

_BITS = {
    "f32": 32.0, "fp32": 32.0, "f16": 16.0, "fp16": 16.0, "bf16": 16.0,
    "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q5_k_s": 5.6, "q5_1": 6.0, "q5_0": 5.6,
    "q4_k_m": 4.9, "q4_k_s": 4.7, "q4_1": 5.1, "q4_0": 4.7, "q3_k_l": 4.3, "q3_k_m": 4.0,
    "q3_k_s": 3.7, "q2_k": 3.2, "q2_k_s": 3.0,
    "iq4_nl": 4.7, "iq4_xs": 4.5, "iq3_m": 3.8, "iq3_s": 3.7, "iq3_xs": 3.5, "iq3_xxs": 3.3,
    "iq2_m": 2.9, "iq2_s": 2.7, "iq2_xs": 2.6, "iq2_xxs": 2.4, "iq1_m": 2.2, "iq1_s": 2.0,
    "mxfp4": 4.25, "nvfp4": 4.5, "nf4": 4.5, "fp8": 8.0, "int8": 8.0, "int4": 4.5,
    "gptq": 4.16, "awq": 4.16, "w4g128": 4.16, "w8a8": 8.0,
    "q4f16_1": 4.5, "q4f32_1": 4.5, "q3f16_1": 3.5, "q0f16": 16.0, "q0f32": 32.0,
}  # fmt: skip
_WITH_WHOLE_ENDS = re.compile(r"gptq|awq|w4g", re.IGNORECASE)
_WHOLE_BITS = 16


def bits_per_weight(quantization: str | None) -> float | None:
    """None where the name says nothing known; `GPTQ-Int4`, `Q4_K_M` and `awq_marlin` are known."""
    if quantization is None:
        return None
    name = quantization.lower().replace("-", "_").replace(" ", "_")
    if name in _BITS:
        return _BITS[name]
    # The longest known name that begins a word of it: q4_k_m before q4, awq of awq_marlin.
    known = sorted(_BITS, key=len, reverse=True)
    return next((_BITS[one] for one in known if re.search(rf"(?:^|_){one}(?:_|$)", name)), None)


def weight_bytes(parameters: int | None, quantization: str | None, ends: int = 0) -> int | None:
    """What so many weights take, `ends` of them in embeddings and head; None where the parameters
    or the quantisation are unknown."""
    bits = bits_per_weight(quantization)
    if parameters is None or bits is None or quantization is None:
        return None
    whole = min(ends, parameters) if _WITH_WHOLE_ENDS.search(quantization) else 0
    return round(((parameters - whole) * bits + whole * _WHOLE_BITS) / 8)
