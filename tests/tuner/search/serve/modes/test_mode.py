"""Contract of the modes: every name that a spec may say has a module, as its rules expect it."""

from typing import get_args

from tuner.catalog.serve_rules.rules import ROLES
from tuner.config.serve import Role
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.program import program_roles
from tuner.spec.serving.goal import Mode

UNIT = {Role.ATTENTION, Role.EXPERT}
"""An option that decodes is launched as these where a mode prices its own."""


def test_every_mode_launches_the_roles_of_its_rules() -> None:
    assert set(ROLES) == set(get_args(Mode))
    for name in get_args(Mode):
        mode = load_mode(name)
        launched = {mode.launched_roles.get(role, role) for role in program_roles(name)}
        if mode.option_noun:
            launched = launched - {Role.DECODE} | UNIT
        assert launched == ROLES[name], name
        assert not (mode.is_routed and mode.makes_options), name
