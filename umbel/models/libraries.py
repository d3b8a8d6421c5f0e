"""Networks from libraries by name, without weights: ``torchvision:resnet18 num_classes=10``.

Of ``torchvision`` and ``timm``, a model by the name that the library gives it; of ``transformers``, a class
that gives logits, with the options of its config, or with ``config=FOLDER`` of a model on this disk. Nothing
is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from umbel.protocol.errors import ConfigError


def from_torchvision(name: str, **options: Any) -> nn.Module:
    """Build a model of ``torchvision.models``."""
    network: nn.Module = import_module("torchvision.models").get_model(name, weights=None, **options)
    return network


def from_timm(name: str, **options: Any) -> nn.Module:
    """Build a model of ``timm``."""
    network: nn.Module = import_module("timm").create_model(name, pretrained=False, **options)
    return network


def from_transformers(name: str, config: str = "", **options: Any) -> nn.Module:
    """Build a model of ``transformers``, of a class with its own config, or of one for all configs."""
    library = import_module("transformers")
    kind = getattr(library, name)
    if config:
        settings = library.AutoConfig.from_pretrained(config, local_files_only=True, **options)
    elif getattr(kind, "config_class", None) is None:
        raise ConfigError(f"{name} is for models of all kinds: say which by config=FOLDER", code="config.model-options")
    else:
        settings = kind.config_class(**options)
    settings.use_cache = False  # for what is generated word by word
    network: nn.Module = kind.from_config(settings) if hasattr(kind, "from_config") else kind(settings)
    return network


LIBRARIES: dict[str, Callable[..., nn.Module]] = {
    "torchvision": from_torchvision,
    "timm": from_timm,
    "transformers": from_transformers,
}


def library_of(name: str) -> tuple[Callable[..., nn.Module], str] | None:
    """Return what builds ``library:model``, and the model's name; None where it is no library of these.

    Raises
    ------
    ConfigError
        When the library is not installed, or the name is one that it would look for elsewhere.
    """
    library, _, model = name.partition(":")
    if library not in LIBRARIES:
        return None
    try:
        import_module(library)
    except Exception as error:
        raise ConfigError(
            f"model {name!r} needs {library}: {error}; pip install {library}", code="config.missing-library"
        ) from error
    if not re.fullmatch(r"[\w.-]+", model):
        raise ConfigError(f"model {name!r}: {model!r} is no model of {library}", code="config.model-name")
    return LIBRARIES[library], model
