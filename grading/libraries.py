"""The libraries that the course's set-up installs. Imports nothing of the project."""

from __future__ import annotations

import sys

# What a submission may import beside its own modules: what the hand-outs' set-up installs, by the names that Python
# imports, and what these packages bring with them.
INSTALLED = {
    "torch", "torchvision", "torchaudio", "numpy", "sklearn", "tqdm", "sentencepiece", "tokenizers", "requests",
    "filelock", "importlib_metadata",
    "PIL", "certifi", "charset_normalizer", "fsspec", "idna", "jinja2", "joblib", "markupsafe", "mpmath", "networkx",
    "scipy", "sympy", "threadpoolctl", "triton", "typing_extensions", "urllib3", "zipp",
}  # fmt: skip
# Modules that the standard library has in some of the Pythons from 3.10 on, and not in the one that runs this.
OTHER_PYTHONS = {
    "__main__", "aifc", "annotationlib", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "compression",
    "crypt", "distutils", "imghdr", "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes",
    "smtpd", "sndhdr", "spwd", "sunau", "telnetlib", "tomllib", "uu", "xdrlib",
}  # fmt: skip
ALLOWED = INSTALLED | OTHER_PYTHONS | set(sys.stdlib_module_names)
