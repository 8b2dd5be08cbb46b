"""transformers' batched generate, for `bench_peers`: PYTHON scripts/peer_transformers.py DIR < prompts

Runs in an environment of its own, so it imports nothing of this project. Standard input: {"prompts": [[id, ...], ...],
"new": 32, "batch": 16, "threads": 2}; prompts are equally long. Output: {"seconds": ..., "version": ...}, without
loading and one warm-up batch.
"""

import json
import sys
import time

import torch
import transformers


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
        start = time.perf_counter()
        for ids in batches:
            generate(ids)
    print(json.dumps({"seconds": time.perf_counter() - start, "version": transformers.__version__}))


if __name__ == "__main__":
    main()
