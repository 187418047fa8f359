"""A cuTile kernel's Tile IR, the same wherever its source lies: what a digest of its code is made from.

Imports nothing else of the package, so that a script can use it beside an older one.
"""

from __future__ import annotations

import io
from typing import Any
from unittest import mock


def tile_ir(kernel: Any, signature: Any, gpu_code: str) -> tuple[bytes, str]:
    """(bytecode without files, lines and the kernel's name, options of the compiler) of a `@ct.kernel` function.

    cuda.tile leaves places out for its crash reports and has no option for it, so that the function which writes
    bytecode is replaced. Raises `AttributeError` where another release of it has none of that name.
    """
    from cuda.tile import _compile
    from cuda.tile.compilation import export_kernel

    write, bytecode = _compile._get_bytecode, io.BytesIO()

    def without_places(ir: Any, options: Any, anonymize_debug_info: bool) -> Any:
        return write(ir, options, anonymize_debug_info=True)

    with mock.patch.object(_compile, "_get_bytecode", without_places):
        export_kernel(
            kernel, [signature.with_symbol("kernel")], bytecode, gpu_code=gpu_code, output_format="tileir_bytecode"
        )
    return bytecode.getvalue(), str(kernel._compiler_options)
