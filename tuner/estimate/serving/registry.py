"""Serving engines by name: their server commands and readers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tuner.config.serve import Role
from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.mistakes import read_flags
from tuner.engines.reading.options_file import (
    Beside,
    last_part,
    options_file_flags,
    with_further,
    with_options,
)
from tuner.engines.reading.programs import refuse_unread, starts_training
from tuner.engines.reading.serve_launch import ServingLaunch, Surroundings
from tuner.engines.reading.serve_words import ServerFlags, server_flags, starts_server
from tuner.engines.registry import engine_file
from tuner.engines.serving.releases import ENGINES, RELEASES
from tuner.errors import SpecError
from tuner.estimate.registry import is_command
from tuner.estimate.serving.objects import ServerText, is_objects, object_commands
from tuner.estimate.serving.router_launch import RouterLaunch, read_router
from tuner.estimate.started import LONGEST_BYTES
from tuner.spec.files import read_small_text, shown_path, shown_value


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReader:
    """One engine."""

    server: ServerFlags
    read: Callable[[Flags, Surroundings], ServingLaunch]
    options: tuple[str, ...] = ()
    """Flags that name a file of options."""
    file_counts: bool = False
    """The options file overrides the command."""
    further: tuple[str, ...] = ()
    """Options that may name a further file."""

    def options_only(self, text: str, *, source: str) -> Flags | None:
        """Return the flags of a text that is nothing but an options file; None for any other."""
        server = self.server
        return options_file_flags(
            text, source=source, known=server.read, canonical=server.canonical
        )

    def flags(self, text: str, *, source: str, beside: Beside) -> Flags | None:
        """Return the flags of the engine's server in a text; None where it starts none.

        Raises:
            SpecError: it starts several, or a file that it names is missing.
        """
        known, canonical = self.server.read, self.server.canonical
        flags = self.options_only(text, source=source)
        if flags is None:
            flags = server_flags(text, source=source, server=self.server)
            if flags is not None:
                flags = with_options(
                    flags,
                    self.options,
                    beside,
                    file_counts=self.file_counts,
                    canonical=canonical,
                )
        return None if flags is None else with_further(flags, self.further, beside, known=known)

    def launch(self, flags: Flags, around: Surroundings) -> ServingLaunch:
        """Return what the flags launch, or refuse all that cannot be used."""
        return read_flags(flags, lambda given: self.read(given, around))


def _reader(name: str) -> EngineReader:
    module = engine_file(name, "read")
    return EngineReader(
        server=module.SERVER,
        read=module.read,
        options=getattr(module, "OPTIONS", ()),
        file_counts=getattr(module, "FILE_COUNTS", False),
        further=getattr(module, "BALANCERS", ()),
    )


_NUMBER: Final = r"\d+(?:\.\d+){1,2}(?:\.?(?:rc|post)\d+)?"
"""A release in the tag of an image."""

READERS: Final[Mapping[str, EngineReader]] = {
    name: _reader(name) for name in ENGINES if find_spec(f"tuner.engines.{name}.read")
}
"""Engines whose launches are read; those without a read.py are only planned."""


def read_serving_launch(
    launch: str,
    around: Surroundings,
    *,
    engine: str,
    format_name: str | None = None,
    role: str | None = None,
) -> ServingLaunch:
    """Read a launch file, or a command that was pasted instead of one.

    Args:
        launch: path of a file, or a command or its arguments as text.
        around: what the flags are checked against.
        engine: of the spec, whose flags a text without a program is read as.
        format_name: the launch's engine, where it is stated.
        role: of the group that is meant, or its name, where a file starts several.

    Raises:
        SpecError: no such file or engine, or a launch that cannot be read.
    """
    source, text, folder = launch_text(launch)

    def beside(word: str) -> str | None:
        path = Path(word) if folder is None else folder / last_part(word)
        if not path.is_file():
            return None
        return read_small_text(path, what="options", most_bytes=LONGEST_BYTES)

    return read_serving_text(
        text,
        around,
        engine=engine,
        format_name=format_name,
        source=source,
        role=role,
        beside=beside,
    )


def launch_text(launch: str) -> tuple[str, str, Path | None]:
    """Return what messages call a launch, its text, and the folder of its file."""
    if is_command(launch, Path(launch)):
        if len(launch) > LONGEST_BYTES:
            raise SpecError(f"the command: longer than {LONGEST_BYTES} characters")
        return "the command", launch, None
    text = read_small_text(Path(launch), what="launch", most_bytes=LONGEST_BYTES)
    return shown_path(Path(launch)), text, Path(launch).parent


def other_goal(launch: str, *, kind: str) -> str:
    """Say in what a launch and a spec's kind of goal differ; empty: in nothing that is seen."""
    source, text, _ = launch_text(launch)
    if kind == "serve":
        says = "the launch trains, the spec serves; give a spec with goal.kind: train, or a server"
        return f"{source}: {says}" if starts_training(text) else ""
    for server_text in object_commands(text, source=source) or (ServerText(name="", text=text),):
        for name, reader in READERS.items():
            if starts_server(server_text.text, source=source, server=reader.server):
                return (
                    f"{source}: the launch serves, by {name}, the spec trains; give a spec with"
                    " goal.kind: serve and its traffic, or a command that trains"
                )
    return ""


def read_serving_text(
    text: str,
    around: Surroundings,
    *,
    engine: str,
    source: str,
    format_name: str | None = None,
    role: str | None = None,
    beside: Beside = lambda _: None,
) -> ServingLaunch:
    """Read the text of a launch; `source` is what messages call it.

    Args:
        text: of a script, a command, a file of options or of Kubernetes objects.
        around: what its flags are checked against.
        engine: of the spec, whose flags a text without a program is read as.
        source: what messages call it.
        format_name: the launch's engine, where it is stated.
        role: of the group that is meant, or its name, where the text starts several.
        beside: gives the files that the text names.

    Raises:
        SpecError: no such engine, or a launch that cannot be read.
    """
    if format_name is not None and format_name not in READERS:
        raise SpecError(f"--format {shown_value(format_name)} is none of {', '.join(READERS)}")
    # The spec's engine first, so that bare flags are read as its.
    names = [format_name] if format_name else sorted(READERS, key=lambda name: name != engine)
    commands = object_commands(text, source=source)
    texts: tuple[ServerText, ...] = (ServerText(name="", text=text),)
    if commands is not None:
        is_options = not is_objects(text) and any(
            READERS[name].options_only(text, source=source) for name in names
        )
        texts = texts if is_options else commands
    launches = [
        (server_text.name, replace(launch, replicas=server_text.replicas))
        for server_text in texts
        if (launch := _launch(server_text, around, names=names, source=source, beside=beside))
        is not None
    ]
    if not launches:
        for server_text in texts:
            refuse_unread(server_text.text, source=source)
        if commands == () and texts == ():
            raise SpecError(
                f"{source}: starts no server: YAML without a pod, a Compose service or a server's"
                " options; name the rendered objects, or paste the server's command"
            )
        if router := _router(texts, source=source, beside=beside):
            raise SpecError(
                f"{source}: starts a router, {router}, which serves no requests itself; estimate "
                "the"
                " launch of one of its instances, and say with --instances how many there are"
            )
        raise SpecError(
            f"{source}: starts no server of {' or '.join(names)}; name the file that holds"
            " `vllm serve`, `python -m sglang.launch_server` or `trtllm-serve serve`, or paste the"
            " command; images that serve by themselves are known by name, as vllm-openai"
        )
    release = _tagged_release(text, launches[0][1].engine)
    launches = [(name, replace(launch, release=release)) for name, launch in launches]
    launch = _chosen(launches, role=role, source=source)
    try:
        router = _router(texts, source=source, beside=beside)
    except SpecError as error:
        return replace(launch, notes=(*launch.notes, f"the router is not read: {error}"))
    if router is None:
        return launch
    counterpart = None if launch.counterpart is None else _behind(launch.counterpart, router)
    return replace(_behind(launch, router), counterpart=counterpart)


def _behind(launch: ServingLaunch, router: RouterLaunch) -> ServingLaunch:
    """Return a launch with what the router in front of it looks for."""
    note = f"in front is a router, {router}; an even share of the requests is priced"
    cautions = router.cautions(launch.setting.degrees.attention_data)
    return replace(
        launch,
        notes=(*launch.notes, note, *cautions),
        follows_prefixes=router.follows_prefixes,
        finds_ranks=launch.finds_ranks or (router.finds_ranks and not cautions),
    )


def _tagged_release(text: str, engine: str) -> str:
    """Return the release that the tags of the engine's images say; empty where none or several."""
    described = [
        manifest for releases in RELEASES.values() for manifest in releases.get(engine, ())
    ]
    images = {manifest.image.partition(":")[0] for manifest in described if manifest.image}
    named = "|".join(map(re.escape, sorted(images))) or "(?!)"
    tags = {*re.findall(rf"(?:{named}):v?({_NUMBER})", text)}
    tags -= {manifest.release for manifest in described}
    return tags.pop() if len(tags) == 1 else ""


def _router(texts: Sequence[ServerText], *, source: str, beside: Beside) -> RouterLaunch | None:
    """Return the first router that is started; None where there is none."""
    for server_text in texts:
        router = read_router(
            server_text.text, source=source, beside=partial(_read_named_file, server_text, beside)
        )
        if router is not None:
            return router
    return None


def _read_named_file(server: ServerText, beside: Beside, word: str) -> str | None:
    """Return a file that a command names: one of its object, or one beside it."""
    return server.files.get(last_part(word)) or beside(word)


def _launch(
    server: ServerText,
    around: Surroundings,
    *,
    names: Sequence[str],
    source: str,
    beside: Beside,
) -> ServingLaunch | None:
    """Read a command by the first engine whose server it starts."""
    named = partial(_read_named_file, server, beside)
    for name in names:
        reader = READERS[name]
        flags = reader.flags(server.text, source=source, beside=named)
        if flags is not None:
            refuse_unread(server.text, source=source)
            return reader.launch(flags, around)
    return None


def _chosen(
    launches: Sequence[tuple[str, ServingLaunch]], *, role: str | None, source: str
) -> ServingLaunch:
    """Return the launch of a group, or of the only group with a role, with its other half.

    Of one prefill and one decode launch, prefill's where neither is named.
    """
    halves = {
        half: [launch for _, launch in launches if launch.role is half]
        for half in (Role.PREFILL, Role.DECODE)
    }
    is_pair = all(len(half) == 1 for half in halves.values())
    if is_pair and role is None and len(launches) == len(halves):
        role = Role.PREFILL.value
    named = [launch for name, launch in launches if name and name == role]
    matching = named or [launch for _, launch in launches if role in (None, launch.role.value)]
    if len(matching) == 1:
        chosen = matching[0]
        others = [
            launch for half in halves.values() for launch in half if launch.role is not chosen.role
        ]
        has_other = chosen.role in halves and len(others) == 1 and others[0].engine == chosen.engine
        return replace(chosen, counterpart=others[0] if has_other else None)
    known = ", ".join(name or launch.role.value for name, launch in launches)
    if not matching:
        raise SpecError(f"{source}: --role {shown_value(str(role))} is none of {known}")
    raise SpecError(
        f"{source}: starts {len(matching)} servers; name one of them with --role: {known}"
    )
