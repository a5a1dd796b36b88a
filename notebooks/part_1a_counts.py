# %% [markdown]
# # Part 1. From counts to attention
#
# ## 1.1 A text as numbers
#
# A language model answers one question: given the text so far, how likely is each next token? Here a token is one
# character, so that the vocabulary is small enough to look at. The text is the bundled set of film reviews. One review
# in ten is *held out*: no model learns from it. A model is good if it is good there.

# %%
reviews = [example.sentence.lower() for example in create_data("data/films-train.txt", 5)]
cut = len(reviews) * 9 // 10
texts = ["".join(f"{review}\n" for review in part) for part in (reviews[:cut], reviews[cut:])]
characters = sorted(set("".join(texts)))
v = len(characters)
number = {character: index for index, character in enumerate(characters)}
ids, held_out = (torch.tensor([number[character] for character in text]) for text in texts)
print(f"{len(ids)} characters to learn from, {len(held_out)} held out, {v} different ones: {''.join(characters)!r}")
print(repr(texts[0][:16]), "is", ids[:16].tolist())

# %% [markdown]
# ## 1.2 Counting pairs
#
# The simplest model looks at the last character alone: after `q`, nearly always `u`. This is a *bigram* model. To
# learn it, count.
#
# Write `count_pairs`. One trap: `counts[first, second] += 1` with tensors of indices adds only once to a place that
# stands in them twice. `index_put_` with `accumulate=True` adds every time.


# %% exercise
def count_pairs(ids, v):
    """How often each token follows each. ids: s -> v v; counts[a, b] is how often b follows a."""
    counts = torch.zeros(v, v)
    # >>> the pairs are (ids[0], ids[1]), (ids[1], ids[2]), ...; add 1 to counts for each
    ones = torch.ones(len(ids) - 1)
    counts.index_put_((ids[:-1], ids[1:]), ones, accumulate=True)
    # <<<
    return counts


count_pairs = check_small("counts", count_pairs)

# %% [markdown]
# Now make probabilities of the counts. In row $a$ stands what comes after $a$, so each *row* must sum to 1:
#
# $$p(b \mid a) = \frac{\text{counts}_{ab} + 1}{\sum_{b'} (\text{counts}_{ab'} + 1)}$$
#
# Why add 1? A pair that happens never to stand in the training text would get probability 0: "impossible". If it then
# stands in a new text, the whole text is impossible.


# %% exercise
def probabilities(counts):
    """v v -> v v, each row sums to 1."""
    # >>> add 1 to each count, divide each row by its sum (keepdim=True keeps the sums a column)
    counts = counts + 1
    return counts / counts.sum(dim=-1, keepdim=True)
    # <<<


probabilities = check_small("probabilities", probabilities)
counted = probabilities(count_pairs(ids, v))  # v v
shown = [character.replace("\n", "\\n").replace(" ", "_") for character in characters]
plt.figure(figsize=(5, 4.6))
plt.imshow(counted, cmap="Blues")
plt.xticks(range(v), shown, fontsize=6)
plt.yticks(range(v), shown, fontsize=6)
plt.xlabel("next character")
plt.ylabel("character")
plt.show()

# %% [markdown]
# ## 1.3 How good is it? The loss
#
# The loss is the mean of $-\log p$ of the characters that really came. It is 0 for a model that knew every one, and
# $\log v$ for a model that has no idea: it holds all $v$ characters equally likely. Why the logarithm? Probabilities
# of a text multiply, their logarithms add, so the mean over a text is a fair measure for any length.


# %% exercise
def mean_loss(p, ids):
    """The mean of -log p[token, next] over the pairs of a text. p: v v, ids: s -> a number."""
    # >>> pick p at all pairs at once by indexing with two tensors
    return -p[ids[:-1], ids[1:]].log().mean()
    # <<<


mean_loss = check_small("mean loss", mean_loss)
print(f"no idea:            {math.log(v):.3f}")
print(f"counted, learned:   {mean_loss(counted, ids):.3f}")
print(f"counted, held out:  {mean_loss(counted, held_out):.3f}")

# %% [markdown]
# **Break it.** The same without adding 1. On the text that was counted it is even a little better. On the held-out
# text one single pair that was never seen makes the loss infinite.

# %%
counts = count_pairs(ids, v)
unsmoothed = counts / counts.sum(-1, keepdim=True)
unseen = (counts[held_out[:-1], held_out[1:]] == 0).sum().item()
print(f"without + 1: learned {mean_loss(unsmoothed, ids):.3f}, held out {mean_loss(unsmoothed, held_out):.3f}")
print(f"pairs of the held-out text that were never seen: {unseen}")

# %% [markdown]
# ## 1.4 The same table, learned
#
# Counting works for a table and for nothing else. So let us find the same table another way, by *gradient descent*:
# begin anywhere, compute the loss of some random pieces of text (a *batch*), and change each number a little in the
# direction that makes the loss smaller. The model is a table of scores, the *logits*; softmax makes probabilities of a
# row: $p_b = e^{z_b} / \sum_{b'} e^{z_{b'}}$. All models below are trained by this same function.


# %%
def batch(ids, rows=16, length=32, generator=None):
    """Random pieces of the text. rows, length + 1: the inputs are all but the last, the targets all but the first."""
    starts = torch.randint(len(ids) - length, (rows, 1), generator=generator)
    return ids[starts + torch.arange(length + 1)]


def learn(logits_of, parameters, steps=400, rate=0.01, ahead=1):
    """Train; the loss of each step. logits_of: ids b s -> logits b s v. ahead: how far the target is from the input."""
    torch.manual_seed(1)  # all models read the same pieces
    parameters = list(parameters)
    optimizer = AdamW(parameters, lr=rate, betas=(0.9, 0.98))
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 50, 2.05 - 2 * step / steps)  # warm up, then cool
        pieces = batch(ids)
        targets = pieces[:, ahead : ahead + 32]
        loss = F.cross_entropy(logits_of(pieces[:, :32]).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def held_out_loss(logits_of):
    pieces = batch(held_out, 128, generator=torch.Generator().manual_seed(2))
    return F.cross_entropy(logits_of(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten()).item()


bigram = nn.Parameter(torch.zeros(v, v))
bigram_losses = learn(lambda ids: bigram[ids], [bigram], rate=0.1)
print(f"at the first step {bigram_losses[0]:.3f}; held out, at the end {held_out_loss(lambda ids: bigram[ids]):.3f}")
print(f"held out, with the counted table: {held_out_loss(lambda ids: counted[ids].log()):.3f}")

# %% [markdown]
# **Break it.** The target of each position is the *next* token. If you forget to shift by one, the target is the token
# that the model is looking at. The loss falls to almost nothing, and the model has learned to copy. A loss that is
# too good to be true is a bug until you have found the reason.

# %%
copying = nn.Parameter(torch.zeros(v, v))
copying_losses = learn(lambda ids: copying[ids], [copying], rate=0.1, ahead=0)
print(f"loss of the last step, not shifted: {copying_losses[-1]:.3f}")
print(f"the same table asked for the next token: {held_out_loss(lambda ids: copying[ids]):.3f}")
print(f"no idea: {math.log(v):.3f}")
