# %% [markdown]
# # Part 3. The assignment
#
# The model of part 2 has read one small file. Now load one that has read far more: the bundled checkpoint, whose
# vocabulary holds pieces of words ([how it was trained](checkpoints/README.md)). All that it computes runs through the
# code that you wrote. For the course's `stories42M.pt`: its paths, and `attention="causal"` for `load_pretrained`.
#
# ## 3.1 Load it and look inside
#
# The figure: how likely is each next token, if we stop after a layer and ask `output` right there (the "logit lens")?

# %%
from engine.tasks import EncodingRules, LlamaDataset
from tokenizer import Tokenizer

tokenizer = Tokenizer(tokenizer_model="checkpoints/minllama1M.model")
model = llama.load_pretrained("checkpoints/minllama1M.pt").eval()
train, dev = create_data("data/films-train.txt", 5), create_data("data/films-dev.txt", 5)
names = json.loads(Path("data/films-label-mapping.json").read_text())
size = sum(parameter.numel() for parameter in model.parameters())
print(f"{size} parameters, {tokenizer.n_words} tokens; {len(train)} reviews to train on, {len(dev)} to judge by")


def encoded(text):
    return torch.tensor([tokenizer.encode(text, bos=True, eos=False)])  # 1 s


tokens = encoded("It is not half as smooth as it thinks.")
pieces = [tokenizer.sp_model.id_to_piece(id).replace("▁", "_") for id in tokens[0].tolist()]
print(list(zip(pieces, tokens[0].tolist(), strict=True)))
with torch.no_grad():
    states = [model.tok_embeddings(tokens)]
    for layer in model.layers:
        states.append(layer(states[-1]))
    lens = [model.output(model.norm(state))[0, :-1].softmax(-1) for state in states]  # s v each
    right = torch.stack([p.gather(1, tokens[0, 1:, None])[:, 0] for p in lens])  # layers s
plt.figure(figsize=(6, 2.2))
plt.imshow(right, aspect="auto", cmap="Greens", vmin=0, vmax=1)
plt.yticks(range(len(states)), ["embedding", *(f"layer {index}" for index in range(len(model.layers)))])
plt.xticks(range(len(pieces) - 1), pieces[1:], rotation=45, fontsize=7)
plt.show()

# %% [markdown]
# ## 3.2 Generate
#
# A language model says how likely each next token is. To write, choose one, append it, and ask again:
#
# - temperature 0: the likeliest one. Safe, and it repeats itself;
# - temperature $T$: draw from $\text{softmax}(z / T)$. Above 1 unlikely tokens gain, below 1 they lose.
#
# A text may grow longer than the model can read: then it reads the last `max_seq_len` tokens only. Read more:
# [sampling](docs/components/sampling.md).


# %% exercise
@torch.inference_mode()
def generate(self, idx, max_new_tokens, temperature=1.0):
    """idx: b s -> b (s + max_new_tokens)"""
    for _ in range(max_new_tokens):
        window = idx[:, -self.params.max_seq_len :]
        logits = self(window)[0][:, -1]  # b v
        # >>> idx_next, b 1: argmax at temperature 0, else torch.multinomial of softmax(logits / temperature)
        if temperature == 0.0:
            idx_next = logits.argmax(dim=-1, keepdim=True)
        else:
            idx_next = torch.multinomial((logits / temperature).softmax(dim=-1), num_samples=1)
        # <<<
        idx = torch.cat((idx, idx_next), dim=1)
    return idx


check("generate", llama.Llama, generate)

# %% chance
torch.manual_seed(7)
for temperature in (0.0, 1.0, 2.0):
    written = model.generate(encoded("Once upon a time there was"), 30, temperature)
    print(f"T = {temperature}:", tokenizer.decode(written[0].tolist()))

# %% [markdown]
# ## 3.3 Zero-shot: asking the language model
#
# After a review comes a question: "Is this movie terrible, bad, okay, good, or wonderful? This movie is ". The model
# says how likely each next token is, so it also says how likely each class name is. Nothing is trained. The score of a
# class is the sum of $\log p$ over the tokens of its name, all read at this one position.
#
# Which position? The last one that is not padding: in a causal model it has seen all others. `self.read` finds it.
# Read more: [zero-shot](docs/components/zero-shot.md).


# %% exercise
def forward(self, input_ids):
    """input_ids: b s -> scores b c. self.label_name_ids: for each class the list of its name's token ids."""
    last = self.read(self.llama, input_ids, self.tokenizer.pad_id)  # b D
    # >>> log-probabilities b v: self.llama.output, then log_softmax over the vocabulary
    log_probabilities = F.log_softmax(self.llama.output(last), dim=-1)
    # <<<
    # >>> for each class the sum over its tokens, b; torch.stack of these, b c; return it
    scores = [log_probabilities[:, ids].sum(dim=-1) for ids in self.label_name_ids]
    return torch.stack(scores, dim=-1)
    # <<<


from classifier import LlamaEmbeddingClassifier, LlamaZeroShotClassifier

check("zero-shot classifier", LlamaZeroShotClassifier, forward)


# %% chance
@torch.no_grad()
def predict(classifier, examples):
    """The class of each example. The model is causal: no review depends on its neighbours in the batch."""
    rules = EncodingRules(classifier.prompt_suffix, model.config.max_seq_len, is_causal=True)
    data = LlamaDataset(examples, tokenizer, rules)
    found = torch.zeros(len(data), dtype=torch.long)
    for batch in data.loader(50, bucket=True):
        found[batch["indices"]] = classifier(batch["token_ids"]).argmax(-1)
    return found


gold = torch.tensor([example.label for example in dev])
asking = LlamaZeroShotClassifier(SimpleNamespace(num_labels=5), tokenizer, names, llama=model).eval()
print(f"always the most frequent class: {majority_accuracy(gold.tolist()):.3f}")
print(f"zero-shot, dev: {(predict(asking, dev) == gold).float().mean():.3f}")

# %% [markdown]
# ## 3.4 AdamW
#
# All models above were trained by the package's AdamW. Here is how it works. Plain gradient descent takes the same rate
# for every number; but some numbers have far larger gradients than others. AdamW keeps two running means
# for each number, of the gradient $g$ and of its square, and divides one by the root of the other: what is left is
# about the *sign* of the gradient, and how steady it is.
#
# $$m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2$$
# $$p \leftarrow p - \eta\frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \frac{m}{\sqrt v + \epsilon}, \qquad
# p \leftarrow p - \eta \lambda p$$
#
# $m$ and $v$ begin at 0, so in the first steps they are too small; the fraction of $\beta$s corrects that. **Why is the
# decay $\lambda$ a step of its own?** In the gradient it would be divided by $\sqrt v$ as well. Outside, every weight
# shrinks by the same share. Here it comes after the update and uses $\eta$, not the corrected rate. Read more:
# [adamw](docs/components/adamw.md).


# %% exercise
@torch.no_grad()
def step(self, closure=None):
    """One update of every parameter that has a gradient."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in self.param_groups:
        lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["step"] += 1
            # >>> the new state["m"] and state["v"]
            state["m"] = beta1 * state["m"] + (1 - beta1) * p.grad
            state["v"] = beta2 * state["v"] + (1 - beta2) * p.grad**2
            # <<<
            alpha = lr
            if group["correct_bias"]:
                # >>> alpha times the fraction of the formula; t is state["step"]
                alpha = lr * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                # <<<
            # >>> change p in place (p -= ...): first the update, then the decay by group["weight_decay"]
            p -= alpha * state["m"] / (state["v"].sqrt() + eps)
            p -= lr * group["weight_decay"] * p
            # <<<
    return loss


check("AdamW", AdamW, step)
p = nn.Parameter(torch.tensor([1.0, 1.0]))
p.grad = torch.tensor([100.0, 0.01])  # of very different size
AdamW([p], lr=0.1).step()
print("after one step at rate 0.1 from 1.0 and 1.0:", [f"{number:.4f}" for number in p.tolist()])

# %% [markdown]
# ## 3.5 A classifier
#
# Instead of asking in words, put one new matrix on the state of the last token and train it, and all the rest with it:
# $\log p = \log\text{softmax}(W \, \text{dropout}(h_{\text{last}}) + b)$. Dropout sets a random part of the state to 0
# in training, so that the matrix cannot rest on a single number. Read more:
# [embedding classifier](docs/components/embedding-classifier.md).


# %% exercise
def forward(self, input_ids):
    """input_ids: b s -> log-probabilities b c. Parts: self.dropout, self.classifier_head."""
    last = self.read(self.llama, input_ids, self.pad_id)  # b D
    # >>> dropout, head, log_softmax over the classes; return it
    return F.log_softmax(self.classifier_head(self.dropout(last)), dim=-1)
    # <<<


check("embedding classifier", LlamaEmbeddingClassifier, forward)

# %% [markdown]
# ## 3.6 Fine-tune
#
# The loss is the same as ever, the mean of $-\log p$ of what is right; now what is right is a class. Two passes over
# the training data. The dotted line is "no idea", $\log c$.

# %% chance
torch.manual_seed(1337)
settings = SimpleNamespace(num_labels=5, hidden_dropout_prob=0.3, option="finetune")
classifier = LlamaEmbeddingClassifier(settings, llama=llama.load_pretrained("checkpoints/minllama1M.pt")).eval()
print(f"dev acc before training: {(predict(classifier, dev) == gold).float().mean():.3f}")
rules = EncodingRules(None, model.config.max_seq_len, is_causal=True)
batches = LlamaDataset(train, tokenizer, rules).loader(16, shuffle=True, bucket=True)
optimizer = AdamW(classifier.parameters(), lr=2e-4)
losses = []
for epoch in range(2):
    classifier.train()
    for some in batches:
        loss = F.nll_loss(classifier(some["token_ids"]), some["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    predicted = predict(classifier.eval(), dev)
    train_loss = sum(losses[-len(batches) :]) / len(batches)
    print(f"epoch {epoch}: train loss {train_loss:.2f}, dev acc {(predicted == gold).float().mean():.3f}")
plt.plot(losses, lw=0.8)
plt.axhline(math.log(len(names)), ls=":", c="grey")
plt.xlabel("step")
plt.ylabel("loss")
plt.show()

# %% [markdown]
# What it gets wrong, and sentences of your own. It has read a small grammar about films, and is easily wrong elsewhere.

# %% chance
for index in (predicted != gold).nonzero()[:4, 0].tolist():
    print(f"{names[gold[index]]}, and not {names[predicted[index]]}: {dev[index].sentence[:90]}")
for sentence in ("The gags are a miracle!", "The visual tricks are poor.", "I liked it"):
    sure = classifier(encoded(sentence))[0].exp()
    print(f"{sentence} -> {names[sure.argmax()]} ({sure.max():.2f})")

# %% [markdown]
# ## 3.7 What the mistakes look like
#
# The trained model again, each time with one usual mistake in its code. The loss is that of the first 20 reviews of the
# dev data, in nats a token; then what it writes at temperature 0; then what the check says. Look for mistakes that
# hardly show: no error is raised, and the text looks like text. Hence a check for every part.


# %%
def named(name, function):
    function.__name__ = name
    return function


def scores_with(change):
    """The right scores, but query, key, value and mask are changed first."""
    name, right = "compute_query_key_value_scores", llama.Attention.compute_query_key_value_scores
    return named(name, lambda self, q, k, v, mask=None: right(self, *change(q, k, v, mask)))


def halves(query, key, *settings, right=rope.apply_rotary_emb):
    query, key = (x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in (query, key))
    turned = right(query, key, *settings)
    return tuple(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in turned)


def without_square(self, x):
    return x / (x.mean(-1, keepdim=True) + self.eps).abs().sqrt()


def gelu(self, x):
    return self.w2(F.gelu(self.w1(x)) * self.w3(x))


def no_residual(self, x):
    return self.feed_forward(self.ffn_norm(self.attention(self.attention_norm(x))))


attention, other = llama.Attention, [0, 2, 1, 3]  # an order of heads
mistakes = {
    "none": ("scores and softmax", attention, scores_with(lambda *given: given)),
    "no mask": ("scores and softmax", attention, scores_with(lambda q, k, v, mask: (q, k, v))),
    "not scaled": ("scores and softmax", attention, scores_with(lambda q, *rest: (q * q.shape[-1] ** 0.5, *rest))),
    "heads 0 1 0 1": ("grouped queries", attention, scores_with(lambda q, k, v, m: (q, k[:, other], v[:, other], m))),
    "halves rotated": ("rotary embedding", rope, named("apply_rotary_emb", halves)),
    "norm without square": ("RMSNorm", llama.RMSNorm, named("_norm", without_square)),
    "GELU for SiLU": ("feed-forward", llama.FeedForward, named("forward", gelu)),
    "no residual": ("layer", llama.LlamaLayer, named("forward", no_residual)),
}  # fmt: skip


# %% chance
@torch.no_grad()
def loss_of_reviews():
    rows = [encoded(example.sentence) for example in dev[:20]]
    losses = [F.cross_entropy(model(row[:, :-1], targets=row)[0][0], row[0, 1:], reduction="none") for row in rows]
    return torch.cat(losses).mean().item()


prompt = encoded("The film is")
for mistake, (part, place, function) in mistakes.items():
    with replaced(place, function):
        loss, said = loss_of_reviews(), fault_of(part)
        text = tokenizer.decode(model.generate(prompt, 14, 0.0)[0].tolist())
    print(f"{mistake + ':':20} loss {loss:5.2f}; {text}\n{'':20} {said or 'right'}")

# %% [markdown]
# ## Where to go on
#
# - The same with the driver, and with the course's data: the commands in [README.md](README.md).
#   `python sanity_check.py --parts` asks your files what this notebook has asked.
# - What each part is for, with its papers and the mistakes that are made most:
#   [docs/components](docs/components/README.md).
# - Methods beyond the base, for a better grade: [advanced/README.md](advanced/README.md). The other half of the
#   transformer: [bert/README.md](bert/README.md).
# - `python -m explore MODEL --text "..." --out page.html` shows a model's attention, rotation and predictions.
