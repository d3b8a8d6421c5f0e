"""Two LoRA adapters: a small language model stays frozen, and clients learn 4,096 numbers beside it.

A GPT-2 of 2 layers learns letters of Python's own library, in public. The clients, files of scikit-learn of which each
has only its code or only its docstrings, then learn adapters, and share nothing but these. Nothing is downloaded.
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

LENGTH, SIGNS, DOCSTRING = 32, " abcdefghijklmnopqrstuvwxyz", re.compile('"""(.*?)"""', re.DOTALL)
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 27, "use_cache": False}
STEADY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Adapted(torch.nn.Module):
    """The language model with an adapter in each layer."""

    def __init__(self):
        super().__init__()
        lora = LoraConfig(r=4, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
        self.lm = get_peft_model(GPT2LMHeadModel(GPT2Config(**SMALL, **STEADY)), lora)
        for name, value in self.lm.named_parameters():
            if "lora_B" in name:  # peft begins with 0, and hypotheses that begin alike stay alike
                torch.nn.init.normal_(value, std=0.02)

    def forward(self, signs):
        """Return a score of each next sign, (rows, time, signs)."""
        return self.lm(input_ids=signs).logits


def texts(files, most, *kinds):
    """Return rows of LENGTH + 1 signs, and each row's file; of files in turn their code (0) or docstrings (1)."""
    rows, names = [], []
    for i, file in enumerate(sorted(files)):
        parts = DOCSTRING.split(file.read_text("utf-8"))[kinds[i % len(kinds)] :: 2]
        signs = [SIGNS.index(sign) for sign in " ".join(re.findall("[a-z]+", " ".join(parts).lower()))]
        count = min(len(signs) // (LENGTH + 1), most)
        if count >= 10:
            rows.append(np.reshape(signs[: count * (LENGTH + 1)], (count, LENGTH + 1)))
            names += [str(file)] * count
    return np.concatenate(rows), names


def backbone(path, steps):
    """Train the language model on Python's own library, and save it without the adapters."""
    library, model = [*Path(sysconfig.get_paths()["stdlib"]).glob("*.py")], Adapted().requires_grad_(True)
    public = torch.tensor(np.concatenate([texts(library, 200, kind)[0] for kind in (0, 1)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    model.lm.disable_adapter_layers()
    for batch in (public[torch.randint(len(public), (64,))] for _ in range(steps)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:]).backward()
        optimizer.step()
    torch.save({name: value for name, value in model.state_dict().items() if "lora" not in name}, path)


def main(picture="lora.svg", seed=2000, steps=600, rounds=12, hidden=10):
    """Train the backbone, learn adapters in several ways, draw what they add, and return the runs."""
    torch.manual_seed(seed)
    folder = Path(tempfile.mkdtemp())
    backbone(folder / "backbone.pt", steps)
    rows, files = texts(Path(sklearn.__file__).parent.glob("*/*.py"), 40, 0, 1)
    own = {"tokens": len(SIGNS), "model": "lora:Adapted", "validation": 0.3, "seed": seed}
    path = umbel.from_arrays(rows, None, client=files, **own).write(folder / "texts")
    given = {"pretrained": str(folder / "backbone.pt"), "seed": seed, "baselines": False}
    free = {"optimizer": "adam", "step_size": 0.02, "local_epochs": 2, "rounds": rounds}
    runs = {
        "two adapters": umbel.run(path, hypotheses=2, **free, **given),
        "one adapter": umbel.run(path, hypotheses=1, **free, **given),
        "one, epsilon 8 for each row": umbel.run(path, hypotheses=1, row_epsilon=8, rows=40, rounds=hidden, **given),
    }
    for name, run in runs.items():
        run.history["metric"].plot(figsize=(7, 3.5), xlabel="round", ylabel="share of next signs", label=name)
    plt.legend(title="Files of scikit-learn that took no part")
    plt.savefig(picture)
    return runs


if __name__ == "__main__":
    main()
