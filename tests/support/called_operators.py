"""Which operators a call consists of."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Called(TorchDispatchMode):
    """Lists the operators that are called, each by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*arguments, **(keywords or {}))
