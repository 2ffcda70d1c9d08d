"""llama.cpp's server for a comparison with it, from the package xllamacpp (pip install xllamacpp).

    python -m eval.llama_server model.gguf --port 8081 --threads 2
    python -m eval.llama_server model.gguf --convert model-bf16.gguf --type bf16      # the same weights, dequantised

It serves one request at a time until Ctrl-C. `--convert` writes a GGUF file of another type instead: matrices are
dequantised and stored in it, vectors in float32; what was lost in quantising stays lost.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from eval.command import run_command


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """What is served, or written.

    Args:
        file: a GGUF file.
        context: positions of a request, its answer included.
        ngram: draft by llama.cpp's own n-gram lookup of this kind.
        convert: write this file and serve nothing.
        type: of its matrices.
    """

    file: Positional[Path]
    port: int = 8081
    threads: int = 2
    context: int = 8192
    ngram: Literal["simple", "map_k", "mod"] | None = None
    convert: Path | None = None
    type: Literal["bf16", "q8_0"] = "bf16"


def convert(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file with the same metadata and matrices of another type."""
    import gguf
    import numpy as np

    wanted, reader = gguf.GGMLQuantizationType[kind.upper()], gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value, (first, *_, last) = field.contents(), (*field.types, field.types[-1])
        if name == "general.file_type":
            value = int(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
        writer.add_key_value(name, value, first, sub_type=last if first == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=sys.stderr.isatty())
    writer.close()


def run(args: ServerArguments) -> None:
    if not args.file.is_file():
        raise ValueError(f"{args.file} does not exist")
    if args.convert is not None:
        if args.convert.exists():
            raise ValueError(f"{args.convert} exists already")
        return convert(args.file, args.convert, args.type)
    try:
        import xllamacpp
    except ImportError as error:
        raise ValueError("llama.cpp's server comes with the package xllamacpp: pip install xllamacpp") from error
    params = xllamacpp.CommonParams()
    params.model.path, params.port = str(args.file), args.port
    params.n_ctx, params.n_parallel, params.cache_prompt = args.context, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    if args.ngram is not None:
        params.speculative.types = [getattr(xllamacpp.common_speculative_type,
                                            f"COMMON_SPECULATIVE_TYPE_NGRAM_{args.ngram.upper()}")]
    server = xllamacpp.Server(params)
    print(f"llama.cpp serves {args.file.name} at {server.listening_address}/v1", flush=True)
    while True:
        time.sleep(3600)


main = partial(run_command, "eval.llama_server", ServerArguments, run, stopped="stopped")

if __name__ == "__main__":
    sys.exit(main())
