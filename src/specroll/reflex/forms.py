"""The forms of Reflex by name."""

from __future__ import annotations

from collections.abc import Callable

from specroll.config import ReflexName, check_reflex
from specroll.reflex.associative import AssociativeReflex
from specroll.reflex.corrector import Corrector, Setting
from specroll.reflex.hidden import HiddenReflex

_FORMS: dict[ReflexName, Callable[[Setting], Corrector]] = {"associative": AssociativeReflex, "hidden": HiddenReflex}


def corrector(reflex: ReflexName, setting: Setting) -> Corrector | None:
    """The form of that name; None for "off". Raises ValueError for one that does not exist."""
    check_reflex(reflex)
    form = _FORMS.get(reflex)
    return None if form is None else form(setting)
