"""Plotly's script, from the installed `plotly` package, to be inlined into pages."""

from importlib import resources

from tuner.errors import EnvironmentMissingError


def plotly_script() -> str:
    """Return the minified script.

    Raises:
        EnvironmentMissingError: plotly is not installed, or its script cannot be inlined.
    """
    install_command = "pip install 'moetune[report]'"
    try:
        file = resources.files("plotly").joinpath("package_data/plotly.min.js")
    except ModuleNotFoundError as error:
        raise EnvironmentMissingError(f"plotly is not installed; {install_command}") from error
    if not file.is_file():
        raise EnvironmentMissingError(f"the installed plotly lacks its script; {install_command}")
    script = file.read_text(encoding="utf-8")
    if "</script" in script.lower():
        raise EnvironmentMissingError(
            f"the installed plotly's script cannot be inlined; {install_command}"
        )
    return script
