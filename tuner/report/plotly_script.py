"""Plotly's script, from the installed `plotly` package: a page carries it and fetches nothing."""

from importlib import resources

from tuner.errors import EnvironmentMissingError


def plotly_script() -> str:
    """Return the minified script.

    Raises:
        EnvironmentMissingError: plotly is not installed, or holds no script that a page can carry.
    """
    way_out = "pip install 'moetune[report]'"
    try:
        file = resources.files("plotly").joinpath("package_data/plotly.min.js")
    except ModuleNotFoundError as error:
        raise EnvironmentMissingError(f"plotly is not installed; {way_out}") from error
    if not file.is_file():
        raise EnvironmentMissingError(f"the installed plotly lacks its script; {way_out}")
    script = file.read_text(encoding="utf-8")
    if "</script" in script.lower():
        raise EnvironmentMissingError(f"the installed plotly's script cannot be inlined; {way_out}")
    return script
