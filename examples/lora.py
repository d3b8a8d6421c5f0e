"""A LoRA adapter: a small language model stays frozen, and clients learn 512 numbers beside it.

A GPT-2 of 2 layers learns letters of the docstrings of Python's own library, in public. The clients, files of
scikit-learn, then learn an adapter for their code, and share nothing but this. Nothing is downloaded.
"""

import re
import sysconfig
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import sklearn
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import umbel

LENGTH, SIGNS = 32, " abcdefghijklmnopqrstuvwxyz"
STEADY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 27}


class Adapted(torch.nn.Module):
    """The language model with an adapter in each attention."""

    def __init__(self):
        super().__init__()
        lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        self.lm = get_peft_model(GPT2LMHeadModel(GPT2Config(**SMALL, **STEADY)), lora)

    def forward(self, signs):
        """Return a score of each next sign, (rows, time, signs)."""
        return self.lm(input_ids=signs).logits


def texts(files, most, kind):  # what fits a pattern, as rows of LENGTH + 1 signs of each file; and each row's file
    docs = {str(one): " ".join(re.findall(kind, one.read_text("utf-8"), re.S)).lower() for one in files}
    signs = {one: [SIGNS.index(sign) for sign in " ".join(re.findall("[a-z]+", docs[one]))] for one in sorted(docs)}
    rows = {one: min(len(signs[one]) // (LENGTH + 1), most) for one in signs if len(signs[one]) > 10 * LENGTH}
    cut = [signs[one][: rows[one] * (LENGTH + 1)] for one in rows]
    return np.concatenate(cut).reshape(-1, LENGTH + 1), np.repeat([*rows], [*rows.values()])


def main(picture="lora.svg", seed=2000, steps=600, **settings):
    """Train the backbone, learn the adapter, draw what it adds, and return the run."""
    torch.manual_seed(seed)
    library, folder = Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), Path(tempfile.mkdtemp())
    model, public = Adapted().requires_grad_(True), torch.tensor(texts(library, 10**6, '"""(.*?)"""')[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    for batch in (public[torch.randint(len(public), (64,))] for _ in range(steps)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:]).backward()
        optimizer.step()
    torch.save(model.state_dict(), folder / "backbone.pt")
    rows, files = texts(Path(sklearn.__file__).parent.glob("*/*.py"), 40, ".+")
    own = {"tokens": len(SIGNS), "model": "lora:Adapted", "validation": 0.3, "seed": seed}
    path = umbel.from_arrays(rows, None, client=files, **own).write(folder / "texts")
    given = {"hypotheses": 1, "step_size": 0.2, "local_epochs": 2, "rounds": 12} | settings
    run = umbel.run(path, pretrained=str(folder / "backbone.pt"), seed=seed, **given)
    run.history["metric"].plot(figsize=(7, 3.5), ylabel="share of next signs", label="the clients' adapter")
    plt.axhline(run.worth["mean"]["each client alone"], linestyle=":", color="gray", label="each client alone")
    plt.legend(title="Files of scikit-learn that took no part")
    plt.savefig(picture)
    return run


if __name__ == "__main__":
    main()
