"""transformers' batched generate, for `bench_peers`: PYTHON scripts/peer_transformers.py DIR < prompts

Runs in an environment of its own, so it imports nothing of this project. Standard input: {"prompts": [[id, ...], ...],
"new": 32, "batch": 16, "threads": 2}; prompts are equally long. Output: {"seconds": ..., "foreign_cores": what
other processes used meanwhile, "version": ...}, without loading and one warm-up batch.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import transformers


def foreign_seconds() -> float:
    """Processor time of everything on this machine but this process."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK") - time.process_time()


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    batches = [torch.tensor(job["prompts"][i : i + job["batch"]]) for i in range(0, len(job["prompts"]), job["batch"])]

    def generate(ids: torch.Tensor) -> None:
        new = job["new"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                             do_sample=False, pad_token_id=0)  # fmt: skip
        assert out.shape[1] == ids.shape[1] + new

    with torch.inference_mode():
        generate(batches[0])
        start, before = time.perf_counter(), foreign_seconds()
        for ids in batches:
            generate(ids)
    seconds = time.perf_counter() - start
    foreign = max(0.0, foreign_seconds() - before) / seconds
    print(json.dumps({"seconds": seconds, "foreign_cores": foreign, "version": transformers.__version__}))


if __name__ == "__main__":
    main()
