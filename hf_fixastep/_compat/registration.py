"""Our networks in the Auto classes, without the ten seconds that importing torch and these takes.

`AutoModelForImageClassification.register` needs the classes themselves (transformers 5), and those need
torch. So registering waits until somebody imports the modules of the Auto classes. It can go when
transformers registers by name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_networks() -> None:
    after_import("transformers.models.auto.configuration_auto", register_config)
    after_import("transformers.models.auto.modeling_auto", register_model)


def register_config(auto: ModuleType) -> None:
    from hf_fixastep.models.configuration_wide_resnet import WideResNetConfig

    auto.AutoConfig.register(WideResNetConfig.model_type, WideResNetConfig, exist_ok=True)


def register_model(auto: ModuleType) -> None:
    from hf_fixastep.models.configuration_wide_resnet import WideResNetConfig
    from hf_fixastep.models.modeling_wide_resnet import WideResNetForImageClassification

    auto.AutoModelForImageClassification.register(
        WideResNetConfig, WideResNetForImageClassification, exist_ok=True
    )


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` with the module of this name: now, or as soon as it has been imported."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, Waiting(name, action))


class Waiting(MetaPathFinder, Loader):
    """Imports one module as Python would have done, and then acts."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action
        self.found: ModuleSpec | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        self.found = importlib.util.find_spec(fullname)
        if self.found is None or self.found.loader is None:
            return self.found
        return importlib.util.spec_from_file_location(fullname, self.found.origin, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        assert self.found is not None
        assert self.found.loader is not None
        self.found.loader.exec_module(module)
        self.action(module)
