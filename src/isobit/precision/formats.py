"""The number formats of the flow and the constants that every quantiser shares.

E4M3 has 4 exponent and 3 mantissa bits, a largest value of 448, no infinity, and one NaN (byte
0x7F, or 0xFF with the sign). A scale is the factor that turns a stored value back into what it
stands for: value = code * scale.

    scale = max(amax, 2^-60) / 448                  as FP32, or rounded up to a power of two (the
                                                    default)

The floor on amax keeps gradients of 1e-12 alive and gives a block of zeros a scale.  A block that
holds a NaN or an infinity gets a NaN scale (E8M0 byte 0xFF) and the value byte 0x7F everywhere, so
that no kernel can turn it into a finite number again.
"""

from typing import Literal

import torch

Format = Literal["e4m3", "bf16", "fp32"]
ScaleKind = Literal["power_of_two", "fp32"]
Side = Literal["rollout", "training"]

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_NAN_BYTE = 0x7F
E8M0_NAN_BYTE = 0xFF
E8M0_BIAS = 127
AMAX_FLOOR = 2.0**-60
BLOCK = 128

DTYPES: dict[Format, torch.dtype] = {"e4m3": E4M3, "bf16": torch.bfloat16, "fp32": torch.float32}
