"""The code of the grading scripts. README.md in this folder lists the files in reading order."""

import os  # like sys, loaded before any file of a student could take its place: nothing else is imported here
import sys

if sys.argv[:1] == ["-m"]:  # `python -m grading`: the current folder, first on the path, may be a student's
    sys.path.sort(key=os.getcwd().__eq__)
    os.environ["PYTHONSAFEPATH"] = "1"  # for the processes that it starts


def run_script(name: str, main: str = "main") -> int:
    """Import a script of the folder above by its name and run its function `main`. Returns the exit status.

    Before that, the script's folder and those of PYTHONPATH go to the end of `sys.path`: both may be a student's, and
    a file there must not be taken for one of Python's own. Status 2 and one line where a file of grading/ is absent.
    """
    home, added = sys.path[0], os.environ.get("PYTHONPATH", "").split(os.pathsep)
    late = {os.path.realpath(path) for path in (home, *added)}
    sys.path.sort(key=lambda path: os.path.realpath(path) in late)
    try:
        script = __import__(name)
        from grading.programs import run_main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "grading":
            raise
        print(f"error: the folder grading/ must lie beside {name}.py, whole; copy it there", file=sys.stderr)
        return 2
    return run_main(getattr(script, main))
