# %% [markdown]
# # The assignment, from two matrices to a classifier
#
# This notebook builds a Llama out of its parts, next to the formula, the shapes and a check of each, and ends with a
# classifier of film reviews that is fine-tuned before your eyes. It runs from top to bottom in about a minute on a
# CPU, on the small model and the small data set that lie in the project: nothing is fetched, no GPU is needed.
#
# Letters for shapes: `b` batch, `s` query position, `t` key position, `h` query heads, `g` key/value heads, `d` head
# dim, `D` model dim, `f` feed-forward dim, `v` vocabulary, `c` classes. A page for each part, with the papers:
# [docs/components](../docs/components/README.md).
#
# The first cell makes the project's modules importable. On Colab it clones and installs the project (*untested
# there*); set `PROJECT` to where your copy is published. Elsewhere it only finds the folder.

# %%
import os
import subprocess
import sys
from pathlib import Path

PROJECT = ""  # on Colab: the https address of the repository
if Path("llama.py").is_file():
    pass  # this cell has run before
elif "google.colab" in sys.modules:
    assert PROJECT, "name the repository in PROJECT"
    if not Path("min-llama").is_dir():
        subprocess.run(["git", "clone", "--depth", "1", PROJECT, "min-llama"], check=True)
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "sentencepiece", "tqdm"], check=True)
    os.chdir("min-llama")
else:
    os.chdir("..")  # Jupyter starts in the notebook's own folder
sys.path.insert(0, os.getcwd())

# %%
import json
import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from engine.data import create_data, majority_accuracy
from llama import load_pretrained
from tokenizer import Tokenizer

torch.manual_seed(1337)
plt.rcParams.update({"figure.figsize": (6, 3), "figure.dpi": 72, "font.size": 9})
tokenizer = Tokenizer(tokenizer_model="checkpoints/minllama1M.model")
model = load_pretrained("checkpoints/minllama1M.pt").eval()
train, dev = create_data("data/films-train.txt", 5), create_data("data/films-dev.txt", 5)
names = json.loads(Path("data/films-label-mapping.json").read_text())
print(f"{len(train)} reviews to train on, {len(dev)} to judge by; classes: {', '.join(names)}")
print(train[0].sentence, "->", names[train[0].label])


def check(what, ours, theirs, tolerance=1e-4):
    """Whether what a cell computes by hand is what the project's code computes."""
    error = (ours - theirs).abs().max().item()
    assert ours.shape == theirs.shape and error < tolerance, f"{what}: off by {error}"
    print(f"{what}: {tuple(ours.shape)}, as in the project's code")


# %% [markdown]
# ## 1. Two matrices
#
# The smallest language model has two matrices: one gives each token a vector, the other turns a vector into a score
# for every next token.
#
# $$\text{logits}_i = W \, E_{t_i}, \qquad
# \text{loss} = -\frac{1}{s}\sum_i \log \text{softmax}(\text{logits}_i)_{t_{i+1}}$$
#
# `E`: `v D`, `W`: `v D`, ids `s`, logits `s v`. It knows the last token alone, so it can learn which word likes to
# follow which, and no more.

# %%
ids = torch.tensor([id for example in train for id in tokenizer.encode(example.sentence, bos=True, eos=False)])
E = torch.nn.Parameter(0.1 * torch.randn(tokenizer.n_words, 32))
W = torch.nn.Parameter(0.1 * torch.randn(tokenizer.n_words, 32))
two_matrices = torch.optim.Adam([E, W], lr=0.03)
for step in range(81):
    some = torch.randint(len(ids) - 1, (1024,))
    loss = F.cross_entropy(E[ids[some]] @ W.T, ids[some + 1])  # logits: 1024 v
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.2f} (all tokens alike: {math.log(tokenizer.n_words):.2f})")
    two_matrices.zero_grad()
    loss.backward()
    two_matrices.step()

# %% [markdown]
# ## 2. Tokens and the embedding
#
# The pretrained model has such a table too, and uses it twice: as `E` and as `W` (the two are *tied*). Between both
# stands everything that follows below. `tok_embeddings`: `v D`; ids `b s` become vectors `b s D`.

# %%
text = "It is not half as smooth as it thinks."
tokens = torch.tensor([tokenizer.encode(text, bos=True, eos=False)])  # b s
pieces = [tokenizer.sp_model.id_to_piece(id).replace("▁", "_") for id in tokens[0].tolist()]
x = model.tok_embeddings.weight[tokens].detach()  # b s D
print(list(zip(pieces, tokens[0].tolist(), strict=True)))
check("embedding", x, model.embed(tokens).detach())
print("tied:", model.output.weight is model.tok_embeddings.weight)

# %% [markdown]
# ## 3. RMSNorm
#
# $$\text{RMSNorm}(x) = \frac{x}{\sqrt{\text{mean}(x^2) + \epsilon}} \odot w$$
#
# `b s D` to `b s D`, each position by itself. Code: `RMSNorm._norm` in [llama.py](../llama.py).


# %%
def rms_norm(x, w, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


layer = model.layers[0]
with torch.no_grad():
    normed = rms_norm(x, layer.attention_norm.weight)
    check("RMSNorm", normed, layer.attention_norm(x))
print(f"sizes before: {x.norm(dim=-1).min():.2f} to {x.norm(dim=-1).max():.2f};", end=" ")
print(f"root mean square after, without w: {rms_norm(x, 1.0).pow(2).mean(-1).sqrt().mean():.2f}")

# %% [markdown]
# ## 4. RoPE
#
# Each pair of neighbours in a query or key is a complex number, turned by its position: $(x_{2i} + j\,x_{2i+1}) \,
# e^{j m \theta_i}$, $\theta_i = 10000^{-2i/d}$. The product of a query and a key then depends on their distance
# alone. `b s h d` to `b s h d`. Code: [rope.py](../rope.py).

# %%
from rope import apply_rotary_emb

d, h, g = model.config.head_dim, model.config.n_heads, model.config.n_kv_heads


def turn(x):
    """x: b s h d"""
    theta = 10000.0 ** (-torch.arange(0, d, 2) / d)  # d/2
    angles = torch.arange(x.shape[1])[:, None] * theta  # s d/2
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(pairs).flatten(-2)


with torch.no_grad():
    query = layer.attention.compute_query(normed).unflatten(-1, (h, d))  # b s h d
    key = layer.attention.compute_key(normed).unflatten(-1, (g, d))  # b s g d
    value = layer.attention.compute_value(normed).unflatten(-1, (g, d))
theirs = apply_rotary_emb(query, key, d, model.config.max_seq_len)
query, key = turn(query), turn(key)
check("query", query, theirs[0])
check("key", key, theirs[1])
ones = turn(torch.tensor([1.0, 0.0]).repeat(d // 2).expand(1, 33, 1, d))[0, :, 0]  # s d
for pair in (0, 2, 4, 8):
    plt.plot(ones[:, 2 * pair], label=f"pair {pair}")
plt.plot(ones @ ones[0] / (d / 2), "k--", label="all pairs, mean")
plt.xlabel("distance between query and key")
plt.legend(loc="lower left", ncols=3, fontsize=7)
plt.show()

# %% [markdown]
# ## 5. Grouped queries
#
# This model has 4 query heads and 2 heads of keys and values: each of these serves two neighbours, `0 0 1 1`. `b s g
# d` becomes `b h t d`. `repeat_interleave` has that order, `repeat` has `0 1 0 1`, and no error tells.

# %%
query = query.transpose(1, 2)  # b h s d
key, value = (part.transpose(1, 2).repeat_interleave(h // g, dim=1) for part in (key, value))  # b h t d
print("query", tuple(query.shape), "key", tuple(key.shape), "value", tuple(value.shape))

# %% [markdown]
# ## 6. Attention and the mask
#
# $$\text{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}} + M\right) V$$
#
# Scores and weights `b h s t`, out comes `b h s d`. $M$ is 0 where a query may see a key and $-\infty$ elsewhere.
# **The assignment's reference has no mask** (`attention="bidirectional"`); the model here was trained with a causal
# one. Both are right, each for its numbers. Code: `Attention.compute_query_key_value_scores`.


# %%
def attend(query, key, value, mask=None):
    scores = query @ key.transpose(-2, -1) / math.sqrt(d)  # b h s t
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    return weights @ value, weights


causal = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()  # s t
ours, weights = attend(query, key, value, causal)
check("scores, softmax, values", ours, layer.attention.compute_query_key_value_scores(query, key, value))
_, unmasked = attend(query, key, value)
figure, axes = plt.subplots(1, 2)
for axis, which, title in ((axes[0], weights, "causal"), (axes[1], unmasked, "bidirectional")):
    axis.imshow(which[0, 0].detach().sqrt(), cmap="Blues", vmin=0, vmax=1)
    axis.set_title(f"first layer, head 0: {title}")
    axis.set_yticks(range(len(pieces)), pieces, fontsize=6)
    axis.set_xticks([])
plt.show()

# %% [markdown]
# ## 7. Back to the residual stream
#
# The heads are put side by side again, `b s D`, one more matrix mixes them, and the result is *added* to what the
# layer read.

# %%
with torch.no_grad():
    attention_output = layer.attention.compute_output(ours.transpose(1, 2).flatten(-2))  # b s D
    check("attention", attention_output, layer.attention(layer.attention_norm(x)))
    stream = x + attention_output

# %% [markdown]
# ## 8. SwiGLU
#
# $$\text{FFN}(x) = W_2 (\text{SiLU}(W_1 x) \odot W_3 x), \qquad \text{SiLU}(a) = a \, \sigma(a)$$
#
# `b s D` to `b s f` and back; each position by itself. One product is a gate for the other.

# %%
with torch.no_grad():
    part = layer.feed_forward
    to_feed = rms_norm(stream, layer.ffn_norm.weight)
    a, b = to_feed @ part.w1.weight.T, to_feed @ part.w3.weight.T  # b s f
    fed = (a * a.sigmoid() * b) @ part.w2.weight.T  # b s D
    check("feed-forward", fed, part(layer.ffn_norm(stream)))
    check("whole layer", stream + fed, layer(x))

# %% [markdown]
# ## 9. The whole model
#
# Four such layers, one more norm, and the table again: $\text{logits} = E \; \text{RMSNorm}(h)$. With `targets` the
# logits of all positions are computed, `b s v`; without, those of the last one, `b 1 v`, which is all that generating
# needs. Beside the loss of each token: how sure the model is before each layer has spoken (the "logit lens").

# %%
with torch.no_grad():
    states = [model.embed(tokens)]
    for each in model.layers:
        states.append(each(states[-1]))
    logits = rms_norm(states[-1], model.norm.weight) @ model.tok_embeddings.weight.T  # b s v
    check("logits, all positions", logits, model(tokens, targets=tokens)[0], 1e-3)
    check("logits, the last position", logits[:, [-1]], model(tokens)[0], 1e-3)
    print(f"loss {F.cross_entropy(logits[0, :-1], tokens[0, 1:]):.2f} for each token of: {text}")
    right = [
        model.output(model.norm(state))[0, :-1].softmax(-1).gather(1, tokens[0, 1:, None])[:, 0] for state in states
    ]
figure, axis = plt.subplots(figsize=(6, 2.2))
axis.imshow(torch.stack(right), cmap="Blues", vmin=0, vmax=1, aspect="auto")
axis.set_xticks(range(len(pieces) - 1), pieces[1:], fontsize=7, rotation=45)
axis.set_yticks(range(5), ["embedding", *(f"layer {number}" for number in range(4))], fontsize=7)
axis.set_title("probability of the token that does come, after each layer")
plt.show()

# %% [markdown]
# ## 10. The check
#
# `sanity_check.py --parts` compares each part with what Hugging Face transformers computed. Edit a line of
# `llama.py`, run it again, and it names the part and, if the mistake is a usual one, the mistake.

# %%
done = subprocess.run([sys.executable, "sanity_check.py", "--parts"], capture_output=True, text=True)
print("\n".join(line for line in done.stdout.splitlines() if line.startswith("  ") and "error" not in line))
print(done.stdout.splitlines()[-1])

# %% [markdown]
# ## 11. Sampling
#
# Temperature 0 takes the likeliest token, 1 draws as the model says: $p_i \propto e^{z_i / T}$. `b v` to `b 1`, once
# for each new token.

# %% chance
prompt = torch.tensor([tokenizer.encode("Once upon a time there was", bos=True, eos=False)])
generator = torch.Generator().manual_seed(1)
for temperature in (0.0, 1.0):
    written = model.generate(prompt, 40, temperature, generator=generator)
    print(f"T = {temperature}:", tokenizer.decode(written[0].tolist()))

# %% [markdown]
# ## 12. Zero-shot: asking the language model
#
# After a review comes "Is this movie terrible, bad, okay, good, or wonderful? This movie is ", and the score of a
# class is $\sum_j \log p(w_j)$ over the tokens of its name. Nothing is trained. Ids `b s`, log-probabilities `b v`,
# scores `b c`.

# %%
from engine.batches import EncodingRules, LlamaDataset
from classifier import LlamaZeroShotClassifier

asking = LlamaZeroShotClassifier(SimpleNamespace(num_labels=5), tokenizer, names, llama=model).eval()


@torch.no_grad()
def predict(classifier, examples):
    """The class of each example. The model is causal: no review depends on its neighbours in the batch."""
    data = LlamaDataset(
        examples, tokenizer, EncodingRules(classifier.prompt_suffix, model.config.max_seq_len, is_causal=True)
    )
    found = torch.zeros(len(data), dtype=torch.long)
    for batch in data.loader(50, bucket=True):
        found[batch["indices"]] = classifier(batch["token_ids"]).argmax(-1)
    return found


gold = torch.tensor([example.label for example in dev])
print(f"always the most frequent class: {majority_accuracy(gold.tolist()):.3f}")
print(f"zero-shot, dev: {(predict(asking, dev) == gold).float().mean():.3f}")

# %% [markdown]
# ## 13. AdamW
#
# $$m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \quad
# p \leftarrow p - \eta\frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \frac{m}{\sqrt v + \epsilon}, \quad
# p \leftarrow p - \eta \lambda p$$
#
# Everything has the parameter's shape. The decay $\lambda$ never enters $m$ and $v$. Code:
# [optimizer.py](../optimizer.py); its check is `optimizer_test.py`.

# %%
from optimizer import AdamW

p = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
adamw = AdamW([p], lr=0.1, weight_decay=0.5)
by_hand, m, v = torch.ones(2), torch.zeros(2), torch.zeros(2)
for t in (1, 2, 3):
    p.grad = torch.tensor([100.0, 0.01])  # of very different size
    adamw.step()
    m, v = 0.9 * m + 0.1 * p.grad, 0.999 * v + 0.001 * p.grad**2
    by_hand = by_hand - 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (v.sqrt() + 1e-6)
    by_hand = by_hand - 0.1 * 0.5 * by_hand
    print(f"step {t}: {p[0].item():.4f} {p[1].item():.4f}")
check("AdamW", by_hand, p.detach(), 1e-5)

# %% [markdown]
# ## 14. A classifier
#
# One new matrix reads the state of the last real token: $\log p = \log\text{softmax}(W \,
# \text{dropout}(h_{\text{last}}) + b)$. `b s` to `b D` to `b c`. Untrained it guesses. Code:
# `LlamaEmbeddingClassifier` in [classifier.py](../classifier.py).

# %%
from classifier import LlamaEmbeddingClassifier

torch.manual_seed(1337)
settings = SimpleNamespace(num_labels=5, hidden_dropout_prob=0.3, option="finetune")
classifier = LlamaEmbeddingClassifier(settings, llama=load_pretrained("checkpoints/minllama1M.pt")).eval()
new = sum(parameter.numel() for parameter in classifier.classifier_head.parameters())
print(f"new parameters: {new} of {sum(parameter.numel() for parameter in classifier.parameters())}")
with torch.no_grad():
    ids = tokens
    last = classifier.llama.hidden_states(ids)[:, -1]  # b D
    scores = last @ classifier.classifier_head.weight.T + classifier.classifier_head.bias
    check("classifier", scores - scores.logsumexp(-1, keepdim=True), classifier(ids))
print(f"dev acc before training: {(predict(classifier, dev) == gold).float().mean():.3f}")

# %% [markdown]
# ## 15. Fine-tuning
#
# $\text{loss} = -\frac{1}{b}\sum_r \log p_{r, y_r}$, and AdamW on *all* parameters, the head's and the Llama's. Two
# passes over the training data.

# %%
rules = EncodingRules(None, model.config.max_seq_len, is_causal=True)
batches = LlamaDataset(train, tokenizer, rules).loader(16, shuffle=True, bucket=True)
optimizer = AdamW(classifier.parameters(), lr=2e-4)
losses = []
for epoch in range(2):
    classifier.train()
    for batch in batches:
        loss = F.nll_loss(classifier(batch["token_ids"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    classifier.eval()
    accuracy = (predict(classifier, dev) == gold).float().mean()
    print(f"epoch {epoch}: train loss {sum(losses[-len(batches) :]) / len(batches):.2f}, dev acc {accuracy:.3f}")
plt.plot(losses, lw=0.8)
plt.xlabel("step")
plt.ylabel("loss")
plt.axhline(math.log(5), ls=":", c="grey")
plt.show()

# %% [markdown]
# ## 16. What it gets wrong
#
# Rows are the classes that were meant, columns those that were predicted. On this small data set errors are few; on
# SST most of them stand beside the diagonal, "bad" for "terrible" and the like.

# %% chance
predicted = predict(classifier, dev)
confusion = torch.zeros(5, 5, dtype=torch.long).index_put_((gold, predicted), torch.ones_like(gold), accumulate=True)
figure, axis = plt.subplots(figsize=(3.6, 3))
axis.imshow(confusion, cmap="Blues")
for row in range(5):
    for column in range(5):
        colour = "white" if confusion[row, column] > confusion.max() / 2 else "black"
        axis.text(column, row, int(confusion[row, column]), ha="center", va="center", fontsize=8, color=colour)
axis.set_xticks(range(5), names, rotation=45, fontsize=7)
axis.set_yticks(range(5), names, fontsize=7)
plt.show()
for index in (predicted != gold).nonzero()[:, 0].tolist():
    print(f"{names[gold[index]]}, and not {names[predicted[index]]}: {dev[index].sentence[:100]}")

# %% [markdown]
# ## 17. Your own sentence
#
# Write one. The model has read 14 million characters of a small grammar about films and stories, and nothing else:
# outside of it, it is easily wrong.

# %% chance
for sentence in ("The gags are a miracle!", "The visual tricks are poor.", "It hangs together.", "I liked it"):
    with torch.no_grad():
        sure = classifier(torch.tensor([tokenizer.encode(sentence, bos=True, eos=False)]))[0].exp()
    print(f"{sentence} -> {names[sure.argmax()]} ({sure.max():.2f})")

# %% [markdown]
# ## Where to go on
#
# - The same with the driver, and with the course's data: the commands in [README.md](../README.md).
# - What each part is for, with its papers and the mistakes that are made most:
#   [docs/components](../docs/components/README.md).
# - Methods beyond the base, for a better grade: [advanced/README.md](../advanced/README.md). The other half of the
#   transformer: [bert/README.md](../bert/README.md).
# - `python -m explore MODEL --text "..." --out page.html` shows a model's attention, rotation and predictions as one
#   page.
