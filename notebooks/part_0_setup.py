# %% [markdown]
# # A Llama from nothing
#
# Three parts of 20 to 30 minutes each:
#
# 1. **From counts to attention.** You count which letter follows which, and end with one attention head.
# 2. **A Llama, piece by piece.** You write the pieces of `llama.py` and train the whole from scratch.
# 3. **The assignment.** You load a trained model, let it write and classify, fine-tune it, and see what mistakes do.
#
# In most sections there is something to write. The last line of the cell checks it: it says `right`, or `WRONG` with a
# sentence about what is wrong. Where your code is not right yet, all later cells use code that is, so that you can go
# on and come back. If you are reading the solved notebook, `python -m notebooks --blank --out notebooks/mine.ipynb`
# writes the one with gaps.
#
# Letters for shapes: `b` batch, `s` query position, `t` key position, `h` query heads, `g` key/value heads, `d` head
# dim, `D` model dim, `f` feed-forward dim, `v` vocabulary, `c` classes.
#
# All of it runs on a CPU in about a minute and fetches nothing. The next cell finds the project. On Colab it fetches
# the project first (*untested there*): set `PROJECT` to the address where your copy is published.

# %%
import os
import subprocess
import sys
from pathlib import Path

PROJECT = ""  # on Colab: the https address of the repository
FOLDER = "."  # where the project lies, if this notebook lies elsewhere
if "google.colab" in sys.modules and not Path("llama.py").is_file():
    assert PROJECT, "name the repository in PROJECT"
    if not Path("min-llama").is_dir():
        subprocess.run(["git", "clone", "--depth", "1", PROJECT, "min-llama"], check=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "sentencepiece", "tqdm"], check=True)
    os.chdir("min-llama")
os.chdir(FOLDER)
while not Path("llama.py").is_file():  # Jupyter starts in the notebook's own folder
    assert Path.cwd() != Path.cwd().parent, "no project here or above: name its folder in FOLDER"
    os.chdir("..")
sys.path.insert(0, os.getcwd())

# %%
import json
import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import llama
import rope
from engine.data import create_data, majority_accuracy
from notebooks.checks import check, check_small, fault_of, replaced
from optimizer import AdamW

torch.set_num_threads(1)  # these models are so small that several threads would mostly wait for one another
plt.rcParams.update({"figure.figsize": (6, 3), "figure.dpi": 72, "font.size": 9})
