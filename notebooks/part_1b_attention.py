# %% [markdown]
# ## 1.5 One attention head
#
# A bigram has forgotten everything but one character. How can a position learn from *all* earlier ones, and choose
# which of them matter? It asks:
#
# - each position makes a **query** (what am I looking for?), a **key** (what do I have?) and a **value** (what do I
#   say, if asked?), each by a matrix;
# - the **score** of a query and a key is their product: large if they point the same way;
# - **softmax over the keys** makes weights of one query's scores. They are positive and sum to 1, so the result is a
#   *mean* of values: as large as one value, however long the text is;
# - the **mask** hides all keys that come after the query.
#
# $$\text{attend}(Q, K, V) = \text{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}} + M\right) V$$
#
# Query, key, value and result: `s d` (or more dimensions before these, so take the last two: `transpose(-2, -1)`).
# $M$ is 0 where a query may see a key and $-\infty$ elsewhere: $e^{-\infty} = 0$, so a hidden key gets weight 0. Why
# $\sqrt d$: see below. Read more: [attention](docs/components/attention.md), [mask](docs/components/mask.md).


# %% exercise
def attend(query, key, value):
    """One head in which a position sees itself and what is before it. ... s d -> ... s d"""
    # >>> scores s t; hide t > s (masked_fill, torch.ones(...).tril()); softmax over the keys; mean of the values
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # ... s t
    visible = torch.ones(scores.shape[-2:]).tril().bool()  # s t
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)  # ... s t
    return weights @ value
    # <<<


attend = check_small("one head", attend)

# %% [markdown]
# **Why divide by $\sqrt d$?** Take random queries and keys. A score is a sum of $d$ products, so its spread grows as
# $\sqrt d$. With a large spread softmax gives nearly all weight to one key. The mean of values becomes a choice of one,
# and the gradient of a choice is almost 0: the head can no longer learn. Divided by $\sqrt d$, the spread is 1 for
# every $d$.

# %%
generator = torch.Generator().manual_seed(3)
sizes = [4, 16, 64, 256]
largest = {"as they are": [], "divided by sqrt(d)": []}
for d in sizes:
    query, key = torch.randn(2, 200, 32, d, generator=generator)  # 200 texts of 32 positions
    scores = query @ key.transpose(-2, -1)
    for name, divisor in (("as they are", 1.0), ("divided by sqrt(d)", math.sqrt(d))):
        largest[name].append((scores / divisor).softmax(-1).amax(-1).mean().item())
    print(f"d = {d:3}: spread of scores {scores.std():5.2f}, divided by sqrt(d) {scores.std() / math.sqrt(d):.2f}")
for name, weights in largest.items():
    plt.plot(sizes, weights, "o-", label=name)
plt.xscale("log")
plt.xticks(sizes, sizes)
plt.xlabel("d")
plt.ylabel("largest of 32 weights, mean")
plt.legend()
plt.show()


# %% [markdown]
# ## 1.6 A model with one head, right and broken
#
# The model: a vector for each character plus a vector for each position (without it, a head could not tell "just
# before me" from "long ago"); one head; its result is *added* to what was there; a matrix gives the logits.
#
# **Break it**, once for each "why" above: scores not scaled, no mask, softmax over the queries (the wrong dimension).


# %%
class OneHead(nn.Module):
    def __init__(self, attend, D=32, length=32):
        super().__init__()
        torch.manual_seed(4)
        self.attend = attend
        self.characters, self.positions = nn.Embedding(v, D), nn.Embedding(length, D)
        self.query, self.key, self.value = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.output = nn.Linear(D, v, bias=False)

    def forward(self, ids):
        """ids: b s -> logits b s v"""
        x = self.characters(ids) + self.positions.weight[: ids.shape[1]]  # b s D
        return self.output(x + self.attend(self.query(x), self.key(x), self.value(x)))


def unscaled(query, key, value):
    return attend(query * math.sqrt(query.shape[-1]), key, value)


def unmasked(query, key, value):
    return (query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])).softmax(-1) @ value


def over_queries(query, key, value):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    hidden = ~torch.ones(scores.shape[-2:]).tril().bool()
    return scores.masked_fill(hidden, -math.inf).softmax(-2) @ value


# %% chance
heads, head_losses = {}, {}
for name, way in (
    ("right", attend), ("not scaled", unscaled), ("no mask", unmasked), ("softmax over queries", over_queries)
):  # fmt: skip
    heads[name] = OneHead(way)
    head_losses[name] = learn(heads[name], heads[name].parameters())
    plt.plot(torch.tensor(head_losses[name]).view(-1, 10).mean(1), label=name)
    print(f"{name + ':':22} held out {held_out_loss(heads[name]):.3f}")
plt.xlabel("ten steps")
plt.ylabel("loss")
plt.legend(fontsize=7)
plt.show()

# %% [markdown]
# Two of the broken heads seem to be *better*. Why? Without a mask a position sees the token that it is to predict. It
# learns to copy it, as in 1.4. With the softmax over the queries it is harder to see: the weights of one key are
# divided by a sum over *all* queries, later ones too, so later tokens leak into earlier results. To find a leak,
# change the last token and look at the positions before it: in a causal model nothing there may change.

# %%
some = held_out[:32][None].clone()  # 1 s
changed = some.clone()
changed[0, -1] = (changed[0, -1] + 1) % v
for name, head in heads.items():
    with torch.no_grad():
        difference = (head(some) - head(changed))[0, :-1].abs().max()
    print(f"{name + ':':22} {'a leak' if difference > 1e-3 else 'no leak'}")

# %% [markdown]
# What does a head look at? If the values are the rows of an identity matrix, the result of a head is its weights. One
# row of the picture is one query; the darker, the more weight. The head without a mask looks one to the right.

# %% chance
text = [shown[index] for index in some[0].tolist()]
figure, axes = plt.subplots(1, 2, figsize=(7, 3.6))
for axis, name in zip(axes, ("right", "no mask"), strict=True):
    head = heads[name]
    with torch.no_grad():
        x = head.characters(some[0]) + head.positions.weight  # s D
        weights = head.attend(head.query(x), head.key(x), torch.eye(len(x)))  # s t
    axis.imshow(weights.sqrt(), cmap="Blues")
    axis.set_xticks(range(32), text, fontsize=5)
    axis.set_yticks(range(32), text, fontsize=5)
    axis.set_title(name)
plt.show()


# %% [markdown]
# ## 1.7 What they write
#
# To write, a model draws a character from its probabilities, appends it, and reads the longer text again. The model
# without a mask has never learned to *guess*: when it writes, there is no next token to copy.


# %% chance
@torch.no_grad()
def write(logits_of, length=100, window=32):
    generator = torch.Generator().manual_seed(5)
    row = torch.tensor([[number["\n"]]])
    for _ in range(length):
        p = logits_of(row[:, -window:])[:, -1].softmax(-1)
        row = torch.cat((row, torch.multinomial(p, 1, generator=generator)), dim=1)
    return "".join(characters[index] for index in row[0, 1:].tolist()).replace("\n", " / ")


print("bigram:  ", write(lambda ids: bigram[ids]))
print("one head:", write(heads["right"]))
print("no mask: ", write(heads["no mask"]))
