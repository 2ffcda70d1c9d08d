"""Run llama.cpp's server for a comparison, from the package xllamacpp (pip install xllamacpp).

    python -m eval.llama_server model.gguf --port 8081 --threads 2
    python -m eval.llama_server model.gguf --port 8082 --draft smaller.gguf           # llama.cpp's own drafting
    python -m eval.llama_server model.gguf --port 8082 --draft head.gguf              # eagle-fsd export --to llama.cpp
    python -m eval.llama_server model.gguf --convert model-bf16.gguf --type bf16      # the same weights, dequantised

The server handles one request at a time and runs until Ctrl-C. It keeps the last prompt for requests that ask for it
(`"cache_prompt": true`, as the benchmark does in later turns), and no earlier ones. `--convert` instead writes a GGUF
file of another type: it dequantises the matrices and stores them in that type, and vectors in float32. It cannot undo
quantisation errors.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from eagle_fsd.cli.exits import check_counts
from eagle_fsd.data.gguf import copy_field
from eval.command import run_command


@dataclass(frozen=True, kw_only=True)
class ServerArguments:
    """Options of `eval.llama_server`.

    Args:
        file: GGUF file to serve or convert.
        port: port of the server.
        threads: CPU threads.
        context: context length of a request, including its answer.
        ngram: draft with this kind of llama.cpp's n-gram lookup.
        draft: draft with this GGUF model of the same vocabulary, or EAGLE-3 head of the target.
        draft_tokens: length of the chains drafted with it. If omitted: llama.cpp's default.
        convert: GGUF file to write, instead of serving.
        type: type of the matrices in this file.
    """

    file: Positional[Path]
    port: int = 8081
    threads: int = 2
    context: int = 8192
    ngram: Literal["simple", "map_k", "mod"] | None = None
    draft: Path | None = None
    draft_tokens: int | None = None
    convert: Path | None = None
    type: Literal["bf16", "q8_0"] = "bf16"


def convert(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file with the same metadata and matrices of another type."""
    import gguf
    import numpy as np

    new_type, reader = gguf.GGMLQuantizationType[kind.upper()], gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
        else:
            copy_field(writer, name, field)
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.I64:  # the draft tokens of an EAGLE-3 head
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, new_type), raw_dtype=new_type)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=sys.stderr.isatty())
    writer.close()


def draft_type(file: Path) -> str:
    """llama.cpp's way to draft with a GGUF file."""
    import gguf

    architecture = gguf.GGUFReader(file).fields["general.architecture"].contents()
    return "DRAFT_EAGLE3" if architecture == "eagle3" else "DRAFT_SIMPLE"


def run(args: ServerArguments) -> None:
    for file in (args.file, args.draft):
        if file is not None and not file.is_file():
            raise ValueError(f"{file} does not exist")
    if args.ngram and args.draft:
        raise ValueError("pass --ngram or --draft, not both")
    if args.draft_tokens is not None and args.draft is None:
        raise ValueError("--draft-tokens needs --draft")
    check_counts(args, "draft_tokens")
    if args.convert is not None:
        if args.convert.exists():
            raise ValueError(f"{args.convert} already exists")
        return convert(args.file, args.convert, args.type)
    try:
        import xllamacpp
    except ImportError as error:
        raise ValueError("llama.cpp's server needs the package xllamacpp: pip install xllamacpp") from error
    kind = draft_type(args.draft) if args.draft else f"NGRAM_{args.ngram.upper()}" if args.ngram else "NONE"
    params = xllamacpp.CommonParams()
    params.model.path, params.port = str(args.file), args.port
    params.n_ctx, params.n_parallel, params.cache_prompt, params.cache_ram_mib = args.context, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    if args.draft:
        drafter = params.speculative.draft
        drafter.mparams.path = str(args.draft)
        drafter.n_max = args.draft_tokens or drafter.n_max
        drafter.cpuparams.n_threads = drafter.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(f"llama.cpp serves {args.file.name} at {server.listening_address}/v1", flush=True)
    while True:
        time.sleep(3600)


main = partial(run_command, "eval.llama_server", ServerArguments, run, stopped="stopped")

if __name__ == "__main__":
    sys.exit(main())
