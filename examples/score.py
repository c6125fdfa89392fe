"""Evaluation only: the log-probability of every token of long documents, and a long prompt that plain `generate` goes on from.

    python examples/score.py
    torchrun --nproc_per_node 2 examples/score.py        # documents are split over both ranks

Every rank makes the same calls with the same arguments; a document may be longer than one rank can hold.
"""

import stand_ins
import torch
from accelerate import PartialState

from hf_longctx import Exchange, patch_model, prefill, score


def main() -> list[float]:
    state = PartialState(cpu=not torch.cuda.is_available())  # without a GPU, else, each process would be alone
    exchange = Exchange() if state.num_processes > 1 else None
    model = patch_model(stand_ins.model()).to(state.device)
    documents = stand_ins.documents(8, seed=2)["input_ids"]

    log_probabilities = score(model, documents, exchange=exchange, capacity=512)  # one tensor a document, on every rank
    for document, scores in zip(documents, log_probabilities):
        far = scores[len(scores) // 2 :].mean().neg().exp()  # does the far context help?
        state.print(f"{len(document)} tokens: perplexity {scores.mean().neg().exp():.1f}, of the second half {far:.1f}")

    prompt = torch.tensor(documents[0], device=state.device)
    logits, cache = prefill(model, prompt, exchange=exchange, to=0)
    if state.is_main_process:  # from here on ordinary transformers, on one rank
        ids = torch.cat([prompt, logits.argmax().view(1)])[None]
        mask = torch.ones_like(ids)
        model.generate(
            ids, attention_mask=mask, past_key_values=cache, use_cache=True, max_new_tokens=8, pad_token_id=0
        )
    state.wait_for_everyone()
    return [float(scores.mean()) for scores in log_probabilities]


if __name__ == "__main__":
    main()
