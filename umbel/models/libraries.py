"""Networks from libraries by name, without weights: ``torchvision:resnet18 num_classes=10``.

Of ``torchvision`` and ``timm``, a model by the name that the library gives it; of ``transformers``, a class
that gives logits, with the options of its config, or with ``config=FOLDER`` of a model on this disk. Nothing
is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from umbel.protocol.errors import ConfigError


def _transformers(library: Any, name: str, config: str = "", **options: Any) -> Any:
    """Build a model of a class with its own config, or of one for all configs."""
    if "trust_remote_code" in options:
        text = f"{name}: trust_remote_code runs code of a folder; give a factory of your own"
        raise ConfigError(text, code="config.model-options")
    kind = getattr(library, name)
    if config:
        # Said, and not left out: transformers asks on the terminal otherwise.
        settings = library.AutoConfig.from_pretrained(config, local_files_only=True, trust_remote_code=False, **options)
    elif getattr(kind, "config_class", None) is None:
        raise ConfigError(f"{name} is for models of all kinds: say which by config=FOLDER", code="config.model-options")
    else:
        settings = kind.config_class(**options)
    settings.use_cache = False  # for what is generated word by word
    return kind.from_config(settings, trust_remote_code=False) if hasattr(kind, "from_config") else kind(settings)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "torchvision": lambda library, name, **options: library.models.get_model(name, weights=None, **options),
    "timm": lambda library, name, **options: library.create_model(name, pretrained=False, **options),
    "transformers": _transformers,
}


def library_of(name: str) -> Callable[..., nn.Module] | None:
    """Return what builds ``library:model`` from its options; None where it is no library of these.

    Raise `ConfigError` where the library is not installed, or would look for the name elsewhere.
    """
    kind, _, model = name.partition(":")
    if kind not in _BUILDERS:
        return None
    try:
        library = import_module(kind)
    except Exception as error:
        wrong = f"model {name!r} needs {kind}: {error}"
        raise ConfigError(f"{wrong}; pip install {kind}", code="config.missing-library") from error
    if not re.fullmatch(r"[\w.-]+", model):
        raise ConfigError(f"model {name!r}: {model!r} is no model of {kind}", code="config.model-name")
    return partial(_BUILDERS[kind], library, model)
