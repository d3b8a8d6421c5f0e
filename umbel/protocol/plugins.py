"""A user's own code, by import path, and its options."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.machinery import PathFinder
from itertools import dropwhile
from typing import Any, TypeVar

from umbel.protocol import builds
from umbel.protocol.errors import ConfigError
from umbel.protocol.home import append, make_folder, umbel_home
from umbel.protocol.project import LAB_PACKAGE, OWN_PATH, PACKAGE, to_install

T = TypeVar("T")


LAB: Mapping[str, str] = {
    "cfl": "umbel_lab.strategies:ClusteredFL",
    "r-dpcfl": "umbel_lab.strategies:RDPCFL",
    "ditto": "umbel_lab.personal:ditto",
    "mr-mtl": "umbel_lab.personal:mr_mtl",
    "apfl": "umbel_lab.personal:apfl",
    "fedrep": "umbel_lab.personal:fedrep",
    "knn-per": "umbel_lab.personal:knn_per",
}
"""Methods that umbel-lab has, by their names in papers."""
_CALLED = (PACKAGE.name, "flwr")  # the packages whose classes say which methods are called
_WRAPPED = (staticmethod, classmethod, property, cached_property)
_ANY = "*"  # in place of a name that code computes


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence that there is no `name` among the built-in ones, and how else to name it."""
    if name in LAB:
        return f"{what} {name!r} is in umbel's lab: pip install {LAB_PACKAGE}, and name it {LAB[name]!r}"
    return f"unknown {what} {name!r}; choose from {', '.join(known)} or give package.module:name"


TRUST = "UMBEL_TRUST"
"""Environment variable with trusted names or modules, separated by spaces."""
_TRUSTED = "trusted.txt"
_LIBRARIES = ("torch.nn", "torch.nn.functional")  # functions of tensors
_distrusted: set[str] = set()


def distrust(*texts: object) -> None:
    """Mark the names of code in a folder's texts, a dataset's or a run's, as untrusted.

    Folders are sent around, and importing or calling a name runs code. So `import_by_name` refuses a name from a folder
    unless the user has given the same name (`trust`).
    """
    _distrusted.update(text for text in texts if isinstance(text, str) and ":" in text)


def trust(*texts: object) -> None:
    """Trust the names of code that the user of this process has typed, and remember them in umbel's home."""
    remember(names_in(texts))


def remember(names: Iterable[str]) -> None:
    """From now on, trust names, ``package.module:attribute``, or whole modules."""
    if new := {*names} - _trusted():
        with suppress(OSError):
            make_folder(umbel_home())
            append(umbel_home() / _TRUSTED, "".join(f"{name}\n" for name in sorted(new)).encode())
        os.environ[TRUST] = " ".join([os.environ.get(TRUST, ""), *sorted(new)]).strip()


def names_in(texts: Iterable[object]) -> set[str]:
    """Return the names of code, ``package.module:attribute``, in values of a run config or a manifest."""
    words = {word for text in texts if isinstance(text, str) for word in text.replace(";", " ").split()}
    named = {word for word in words if ":" in word and "=" not in word}
    # ``flower:package.module:Class`` imports the part after its first word.
    return named | {word.partition(":")[2] for word in named if word.count(":") > 1}


def _trusted() -> set[str]:
    kept = umbel_home() / _TRUSTED
    return {*os.environ.get(TRUST, "").split(), *(kept.read_text(encoding="utf-8").split() if kept.is_file() else [])}


def _is_trusted(name: str) -> bool:
    module = name.partition(":")[0]
    # Keys split their texts differently. So a name anywhere in a folder's text counts as the folder's.
    sent = any(name in text for text in _distrusted)
    return not sent or module in _LIBRARIES or not _trusted().isdisjoint({name, module})


def import_by_name(name: str) -> Any:
    """Return the object called ``package.module:attribute``.

    Raises
    ------
    ConfigError
        If it cannot be imported; the text says which half is missing. Also if the name comes from a folder and the user
        has not given it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise ConfigError(f"cannot import {module_name!r} of {name!r}: give its full name", code="config.import")
    trusted = _is_trusted(name)
    if not trusted and module_name.partition(".")[0] != PACKAGE.name:
        raise _untrusted(name)
    # Without a module of the user's, their folders stay unread: somebody may have sent the working folder.
    with _own_found(_folders_of(module_name) if trusted else []):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # a user's code may raise anything
            if mend := builds.hint(error):
                text = f"cannot import {module_name!r} of {name!r}: {mend}"
                raise ConfigError(text, code="config.mixed-builds") from error
            text = f"cannot import {module_name!r} of {name!r}: {error}"
            if isinstance(error, ModuleNotFoundError) and (packages := to_install(error.name or "")):
                text += f"; pip install {packages}"
            raise ConfigError(text, code="config.import") from error
        except SystemExit as end:  # a script that works when imported would end the command as if it were done
            wrong = f"cannot import {module_name!r} of {name!r}: it ends Python"
            fix = 'put what the script does under if __name__ == "__main__"'
            raise ConfigError(f"{wrong}; {fix}", code="config.import") from end
    try:
        found = getattr(module, attribute)
    except AttributeError:
        raise ConfigError(f"{name!r} names {attribute!r}, which {module_name!r} lacks", code="config.import") from None
    # From umbel's own code a folder may name only classes: the caller checks these, but not other callables.
    if not (trusted or isinstance(found, type)):
        raise _untrusted(name)
    return found


def _untrusted(name: str) -> ConfigError:
    return ConfigError(
        f"a folder names {name!r}, which is code that would run here; if you trust it: umbel --trust {name} ...",
        code="config.untrusted-code",
    )


def own_path() -> str:
    """Return the value of `OWN_PATH` with which another process finds the same modules by name."""
    folders = [*_own_folders(), *map(os.path.abspath, sys.path)]
    return os.pathsep.join(dict.fromkeys(folders))


def _own_folders() -> list[str]:
    return list(filter(None, os.environ.get(OWN_PATH, "").split(os.pathsep)))


def _own_last() -> bool:
    return os.environ.get(OWN_PATH, "").startswith(os.pathsep)


def _folders_of(module_name: str) -> list[str]:
    """Return the folders of the user's modules, from the first that has the named one on; none if it is installed."""
    top = module_name.partition(".")[0]
    if top == PACKAGE.name or module_name in _LIBRARIES or (_own_last() and PathFinder.find_spec(top)):
        return []
    return list(dropwhile(lambda folder: PathFinder.find_spec(top, [folder]) is None, _own_folders()))


@contextmanager
def _own_found(folders: list[str]) -> Iterator[None]:
    """Inside, find the user's modules before installed ones of the same name, unless `OWN_PATH` says otherwise; later,
    after them.

    The user names the first module; its imports, and those of libraries, mean installed modules.
    """
    first = [] if _own_last() else folders
    sys.path[:] = [*first, *sys.path, *(folder for folder in folders if folder not in sys.path)]
    try:
        yield
    finally:
        for folder in first:
            with suppress(ValueError):  # the user's code may have changed the path
                sys.path.remove(folder)


def load_class(what: str, name: str, built_in: Mapping[str, type[T]], base: type[Any]) -> type[T]:
    """Return the class `name`: built in, or a user's as ``package.module:Class``.

    Parameters
    ----------
    what : str
        The kind of class, for errors.
    base : type
        Required base class of a user's class.

    Raises
    ------
    ConfigError
        If there is no such class, or it has another base; the text lists the choices.
    """
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        raise ConfigError(unknown_name(what, name, built_in), code="config.unknown-name")
    found = import_by_name(name)
    if not (isinstance(found, type) and issubclass(found, base)):
        built_on = f"{base.__module__}.{base.__name__}"
        raise ConfigError(f"{what} {name!r} is not a class built on {built_on}", code="config.not-built-on")
    return found


def refuse_uncalled(what: str, kind: type[Any], base: type[Any], instead: Mapping[str, str] = {}) -> None:
    """Refuse a user's class with a public method, or property, that nothing calls.

    umbel calls the methods that its own classes, and Flower's, have. A class uses each further one in its own module,
    or in those of its parents, outside the method itself. Where the code cannot be read, no class is refused.

    Parameters
    ----------
    what : str
        The kind of class, for errors.
    base : type
        The class that all such classes are built on.
    instead : mapping from str to str
        Methods that umbel never calls, though Flower's classes have them or had them, and the nearest that it calls.

    Raises
    ------
    ConfigError
        With the name of the method, and the nearest one that is called.
    """
    package_of = {one: one.__module__.partition(".")[0] for one in kind.__mro__}
    users = [one for one, name in package_of.items() if name not in _CALLED and name not in sys.stdlib_module_names]
    if not users:  # umbel's own class, as each message of a round asks for
        return
    called = {name for one, package in package_of.items() if package in _CALLED for name in _methods(one)} - {*instead}
    further = {name: one for one in users if issubclass(one, base) for name in _methods(one) if name not in called}
    if not further:
        return
    used = {name for module in {one.__module__ for one in users} for name in _names_used(_code(module))}
    for name, owner in further.items():
        if name not in used and _ANY not in used:
            near = instead.get(name) or difflib.get_close_matches(name, sorted(called), 1, cutoff=0)[0]
            text = f"nothing calls {name}, a method of {what} {owner.__module__}:{owner.__qualname__}"
            fix = f"did you mean {near}? If not, call it in that module, or begin its name with an underscore"
            raise ConfigError(f"{text}; {fix}", code="config.uncalled-method")


def _methods(kind: type[Any]) -> list[str]:
    """Return the names of a class's own public methods and properties, in order."""
    public = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    return [
        name
        for name, value in public.items()
        if isinstance(value, _WRAPPED) or (callable(value) and not isinstance(value, type))
    ]


def _code(module: str) -> ast.AST:
    """Return a module's code; where it cannot be read, as if it were to use any name."""
    try:
        return ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return ast.Constant(_ANY)


def _names_used(node: ast.AST, inside: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield each name, attribute and text that code reads, but within a function not the function's own name."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            inside |= {name}
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()) | ast.Constant(str(name)):
            if name not in inside:
                yield name
        case ast.Call(ast.Name("getattr"), [_, attribute, *_]) if not isinstance(attribute, ast.Constant):
            yield _ANY
    for child in ast.iter_child_nodes(node):
        yield from _names_used(child, inside)
