"""The recipe of a drafter: text from the target, resumable training, files that load."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import processors

from paceline.adapt.data import corpus
from paceline.adapt.data.regenerate import (
    RegenerateConfig,
    Regenerator,
    cut_loop,
    draw_prompt,
    folder_documents,
    loop_start,
    regenerate,
)
from paceline.adapt.data.trace_store import TraceStore
from paceline.adapt.families.recipe import target_shape
from paceline.adapt.families.target_handle import TargetTables, load_target_handle
from paceline.adapt.families.training import training_family
from paceline.adapt.recipes.drafter import (
    BestWeights,
    DrafterRecipe,
    evaluate,
    plan_batches,
    rate_at,
    replay,
    replayed_length,
    requests_like,
    train_drafter,
    validation_split,
)
from paceline.adapt.recipes.learning_curve import read_curve, read_validation
from paceline.adapt.recipes.target import TargetRecipe
from paceline.errors import ConfigError
from paceline.serving.loading.families import build_model, load_drafter, read_drafter_files
from paceline.serving.loading.target import read_target
from paceline.serving.sampling.request import RequestTrace
from tests.helpers.fakes import tiny_model, tiny_tokenizer
from tests.helpers.training import TEXT

SHORT = DrafterRecipe(drafter="jetspec", domains=(), text=TEXT, held_out_tokens=60, epochs=1.0, batch_rows=96)


def run_batch(target_dir, temperatures, prompts=([5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [20, 21, 22, 23, 24])):
    writer = Regenerator(read_target(target_dir), batch_requests=len(prompts), max_request_tokens=40, topk=4)
    return writer.run(prompts, temperatures, max_new_tokens=20, seed=0, bucket="b", name="n")


def test_batched_greedy_text_equals_one_request_at_a_time(target_dir):
    traces = run_batch(target_dir, [0.0, 0.0, 0.0])
    model = tiny_model("qwen3", layers=6, width=32)
    for t in traces:
        with torch.no_grad():
            out = model(torch.tensor([t.token_ids]), output_hidden_states=True)
        logits = out.logits[0, t.prompt_len - 1 : -1]
        assert logits.argmax(-1).tolist() == t.token_ids[t.prompt_len :]
        expected = torch.cat([out.hidden_states[i + 1][0] for i in (1, 2, 2)], dim=-1)[:-1]
        assert torch.allclose(t.features, expected, atol=1e-4)
        top = logits.log_softmax(-1).topk(4)
        assert torch.allclose(t.topk_logprobs, top.values, atol=1e-4)
        assert t.finish_reason in ("length", "stop", "loop")


def test_sampled_text_records_the_unscaled_target_distribution(target_dir):
    traces = run_batch(target_dir, [0.8, 1.0, 0.8])
    model = tiny_model("qwen3", layers=6, width=32)
    for t in traces:
        with torch.no_grad():
            logits = model(torch.tensor([t.token_ids])).logits[0, t.prompt_len - 1 : -1]
        assert torch.allclose(t.topk_logprobs, logits.log_softmax(-1).topk(4).values, atol=1e-4)


def test_draws_follow_the_distribution(target_dir):
    prompt, count = [5, 6, 7, 8], 400
    traces = run_batch(target_dir, [0.8] * count, [prompt] * count)
    with torch.no_grad():
        expected = (tiny_model("qwen3", layers=6, width=32)(torch.tensor([prompt])).logits[0, -1] / 0.8).softmax(-1)
    share = torch.bincount(torch.tensor([t.token_ids[4] for t in traces]), minlength=64) / count
    assert float((share - expected).abs().sum()) / 2 < 0.15


def test_exact_short_loops_are_found_and_cut():
    assert loop_start([7] * 5 + [1, 2, 3] * 30) == 16
    assert loop_start(list(range(200))) is None and loop_start([5] * 60) is None
    output, row = [9] * 4 + [5] * 80, torch.arange(86.0)[:, None]
    trace = RequestTrace(
        request_id="r", bucket="b", temperature=0.0, prompt_len=3, token_ids=[1, 2, 3, *output], features=row,
        topk_ids=row[:84], topk_logprobs=row[:84], target_version="t", finish_reason="length",
    )  # fmt: skip
    cut = cut_loop(trace)
    assert (len(cut.token_ids), len(cut.features), len(cut.topk_ids), cut.finish_reason) == (35, 34, 32, "loop")
    assert cut_loop(dataclasses.replace(trace, finish_reason="stop")).finish_reason == "loop"


def test_a_prompt_ends_where_an_answer_begins_or_is_cut(target_dir):
    tokenizer = tiny_tokenizer(64)
    tokenizer.chat_template = None
    document = "ab<|assistant|>cd<|assistant|>ef"
    rng = np.random.default_rng(0)
    whole = RegenerateConfig(truncation_share=0.0)
    seen = {tokenizer.decode(draw_prompt(document, tokenizer, rng, whole)) for _ in range(30)}
    assert len(seen) == 2 and all(s.endswith(tokenizer.decode(tokenizer("<|assistant|>")["input_ids"])) for s in seen)
    cut = [len(draw_prompt(document, tokenizer, rng, RegenerateConfig(truncation_share=1.0))) for _ in range(50)]
    assert min(cut) >= 4 and len(set(cut)) > 5


def test_a_target_with_a_chat_template_of_its_own_is_asked_in_it(target_dir, tmp_path):
    """Toolcalls are the assistant's words; a long chat loses its oldest turns; some prompts begin the answer."""
    tokenizer, rng = tiny_tokenizer(64), np.random.default_rng(0)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    chat = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "ef"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}), encoding="utf-8")
    [document] = folder_documents(tmp_path)

    def drawn(document, **config):
        config = RegenerateConfig(**config)
        return {tokenizer.decode(draw_prompt(document, tokenizer, rng, config)) for _ in range(60)}

    def text(chat, given=""):
        return tokenizer.decode(
            tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + given)[
                "input_ids"
            ]
        )

    whole = {text(chat), text(chat[:1])}
    assert drawn(document, truncation_share=0.0) == whole
    assert drawn(document, truncation_share=1.0) == {*whole, text(chat[:1], "c"), text(chat[:1], "cd")}
    room = len(tokenizer(text(chat[2:]))["input_ids"])
    assert text(chat[2:]) in drawn(document, truncation_share=0.0, max_prompt_tokens=room)
    told = [{"role": "system", "content": "gh"}]
    assert drawn(corpus.chat_document(told + chat), truncation_share=0.0) == {text(told + chat), text(told + chat[:1])}
    room = len(tokenizer(text(told + chat[2:]))["input_ids"])
    assert text(told + chat[2:]) in drawn(
        corpus.chat_document(told + chat), truncation_share=0.0, max_prompt_tokens=room
    )
    called = "<|user|>a\n<|call|>b {}\n<|result|>{}\n<|assistant|>c"
    assert [(m["role"], m["content"]) for m in corpus.messages(called)] == [
        ("user", "a"), ("assistant", "b {}"), ("user", "{}"), ("assistant", "c"),
    ]  # fmt: skip
    for wrong in ([], [{"content": "a"}], "ab"):
        with pytest.raises(ConfigError, match="role"):
            corpus.chat_document(wrong)


def test_prompts_have_the_marks_that_a_service_puts_around_texts_and_no_more_tokens_than_asked_for(tmp_path):
    tokenizer, rng, config = tiny_tokenizer(64), np.random.default_rng(0), RegenerateConfig(max_prompt_tokens=20)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["<pad>", "$A"], special_tokens=[("<pad>", 0)]
    )
    for _ in range(20):
        ids = draw_prompt("the cat sat on the mat " * 100_000, tokenizer, rng, config)
        assert ids == tokenizer.encode("the cat sat on the mat")[: len(ids)] and 4 <= len(ids) <= 20 and ids[0] == 0
    assert draw_prompt(" \n", tokenizer, rng, config) == []


def test_a_file_without_blank_lines_is_many_prompts(tmp_path):
    words = " ".join(f"word{i}" for i in range(5_000))
    (tmp_path / "a.txt").write_text(words + "\r\n\r\nshort\r\n\r\n" + "漢" * 9_000, encoding="utf-8", newline="")
    documents = folder_documents(tmp_path)
    assert max(map(len, documents)) == 4_000 and len(documents) == -(-len(words) // 4_000) + 3
    assert "".join(documents) == words + "漢" * 9_000
    assert all(d.split()[-1] in words.split() for d in documents[:10])


def test_text_files_may_begin_with_a_mark_and_have_blanks_in_blank_lines_and_folders_may_be_called_as_they(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"a" * 50 + b"\r\n \t\r\n" + b"b" * 50)
    (tmp_path / "b.txt").mkdir()
    assert folder_documents(tmp_path) == ["a" * 50, "b" * 50]


@pytest.mark.parametrize("name", ["my texts", "~class-1", "漢" * 60])
def test_a_folder_of_any_name_may_hold_prompts(tmp_path, target_dir, prompts_dir, name):
    shutil.copytree(prompts_dir, tmp_path / name)
    assert list(train_drafter(target_dir, tmp_path / name, tmp_path / "out", SHORT)) == ["prompts"]


def test_a_chat_that_the_models_template_refuses_is_said_so():
    tokenizer = tiny_tokenizer(64)
    tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(ConfigError, match=r"data must hold chats .*: no system here"):
        draw_prompt(f"{corpus.USER}a\n{corpus.ASSISTANT}b", tokenizer, np.random.default_rng(0), RegenerateConfig())


def test_an_unknown_domain_is_refused_before_the_target_is_read(target_dir, tmp_path):
    with pytest.raises(ConfigError, match="domain must be one of"):
        train_drafter(target_dir, None, tmp_path / "out", DrafterRecipe(domains=("poems",)))


@pytest.mark.parametrize("domain", corpus.PROMPT_DOMAINS)
def test_prompts_without_answers_end_where_one_begins(domain, tmp_path):
    (tmp_path / "prose/books").mkdir(parents=True)
    passages = [f"{i} went down to the water again, and nobody who saw it could say why. " * 3 for i in range(100)]
    (tmp_path / "prose/books/a.md").write_text("# Title\n\n" + "\n\n".join(passages), encoding="utf-8")
    train, held = (corpus.documents(domain, tmp_path, side) for side in ("train", "held_out"))
    assert train and all(d.startswith(corpus.USER) and d.endswith(corpus.ASSISTANT) for d in train + held)
    assert not set(train) & set(held) and not any("99 went" in d for d in train + held), (
        "a book's end is for benchmarks"
    )


def test_interrupted_text_goes_on_with_the_same_batches(tmp_path, target_dir, prompts_dir):
    documents = {"prompts": folder_documents(prompts_dir)}

    def run(folder, tokens):
        target = read_target(target_dir, fast_path=False)
        config = dataclasses.replace(TEXT, num_tokens=tokens)
        store = TraceStore(folder / "text")
        state = regenerate(target, store, documents, config, state_file=folder / "text.json")
        ids = [t.token_ids for s in store.list_shards() for t in store.read_shard(s.shard_id)]
        return state, sorted(ids)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(tmp_path / "a", 10)
    resumed, ids = run(tmp_path / "a", 300)
    whole, expected = run(tmp_path / "b", 300)
    assert ids == expected
    assert resumed["tokens"] == whole["tokens"] >= 300


def test_every_domain_has_text_however_few_tokens_are_asked_for(tmp_path, target_dir, prompts_dir):
    documents = dict.fromkeys(("c", "a", "b"), folder_documents(prompts_dir))
    store = TraceStore(tmp_path / "text")
    config = dataclasses.replace(TEXT, num_tokens=1)
    regenerate(read_target(target_dir, fast_path=False), store, documents, config, state_file=tmp_path / "text.json")
    assert {t.bucket for s in store.list_shards() for t in store.read_shard(s.shard_id)} == {"a", "b", "c"}


def test_an_output_folder_that_cannot_be_one_is_refused(tmp_path, target_dir, prompts_dir):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="out must be a folder, got"):
        train_drafter(target_dir, prompts_dir, tmp_path / "out", DrafterRecipe(domains=(), text=TEXT))


def test_foreign_prompts_must_hold_text(tmp_path):
    with pytest.raises(ConfigError, match=r"\.jsonl or \.txt"):
        folder_documents(tmp_path)
    file = tmp_path / "a.jsonl"
    for line, message in (
        (b'{"question": 1}', "must hold 'prompt'"), (b"[1]", "must hold 'prompt', .* got list"),
        (b'{"prompt": "a', "must be JSON: Unterminated"), (b'{"prompt": "\xe4"}', "must be JSON: 'utf-8' codec"),
        (b'{"prompt": 7}', "prompt must be text, got 7"), (b'{"text": null}', "text must be text, got None"),
        (b'{"messages": [{"role": "user"}]}', "messages must be objects"), (b'{"messages": 7}', "messages must be objects"),
        (b'{"text": "\\ud800"}', "must be text of whole characters"), (b"[" * 100_000, "must be JSON: maximum recursion"),
    ):  # fmt: skip
        file.write_bytes(b'{"prompt": "good"}\n\n' + line)
        with pytest.raises(ConfigError, match=rf"a\.jsonl:3:? {message}"):
            folder_documents(tmp_path)
    file.unlink()
    (tmp_path / "b.txt").write_bytes(b"\xe4" * 50)
    with pytest.raises(ConfigError, match=r"b\.txt must be UTF-8 text"):
        folder_documents(tmp_path)


def test_batches_hold_every_request_once_within_the_row_limit():
    lengths = [int(x) for x in np.random.default_rng(0).integers(5, 90, size=200)]
    batches = plan_batches(lengths, 256, torch.Generator().manual_seed(0))
    assert sorted(i for b in batches for i in b) == list(range(200))
    assert all(len(b) * max(lengths[i] for i in b) <= 256 for b in batches)


def test_learning_rate_warms_up_and_settles():
    recipe = DrafterRecipe(learning_rate=1.0, warmup_share=0.1, final_share=0.05)
    rates = [rate_at(s, 100, recipe) for s in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.05)


class StopHereError(Exception):
    pass


@pytest.mark.parametrize("kind", [
    {"drafter": "specblock"},
    {"drafter": "eagle3", "draft_vocab_size": 24},
    {"drafter": "specblock", "draft_vocab_size": 24, "shares_head": True},
    {"drafter": "dflash", "slot_decay": "served"},
])  # fmt: skip
def test_an_interrupted_recipe_ends_with_the_same_weights_and_files(tmp_path, target_dir, prompts_dir, kind):
    recipe = DrafterRecipe(domains=(), text=TEXT, held_out_tokens=60, epochs=2.5, batch_rows=96, **kind)

    def interrupt(done, total, info):
        if info["phase"] == "train" and done == 5:
            raise StopHereError

    with pytest.raises(StopHereError):
        train_drafter(target_dir, prompts_dir, tmp_path / "a", recipe, checkpoint_every=2, progress=interrupt)
    seen = []
    results = train_drafter(
        target_dir, prompts_dir, tmp_path / "a", recipe, checkpoint_every=2,
        progress=lambda done, total, info: seen.append((info["phase"], done)),
    )  # fmt: skip
    assert seen[0] == ("train", 5), "resumed after the checkpoint at step 4"
    train_drafter(target_dir, prompts_dir, tmp_path / "b", recipe)
    a, b = (load_file(tmp_path / name / "drafter.safetensors") for name in "ab")
    assert all(torch.equal(a[k], b[k]) for k in b)
    curves = [read_curve(tmp_path / name) for name in "ab"]
    assert all(curves[0][k] == curves[1][k] for k in ("step", "rows", "loss", "nll")), (
        "the curve has no gap and no knee"
    )
    assert curves[0]["step"][-1] == seen[-1][1] and sorted(curves[0]["seconds"]) == curves[0]["seconds"]
    held_out = [read_validation(tmp_path / name) for name in "ab"]
    assert all(held_out[0][k] == held_out[1][k] for k in ("step", "rows", "nll", "acceptance_length"))
    assert len(held_out[0]["step"]) > 1 and held_out[0]["step"][-1] == seen[-1][1]
    (numbers,) = results.values()
    assert numbers["nll"] > 0 and numbers["acceptance_length_sampled"] >= 1
    drafter = load_drafter(tmp_path / "a", load_target_handle(target_dir))
    assert (drafter.caps.name, drafter.caps.max_depth) == (kind["drafter"], 8)
    config = json.loads((tmp_path / "a" / "config.json").read_text(encoding="utf-8"))
    assert config.get("draft_vocab_size") == kind.get("draft_vocab_size")
    assert ("lm_head.weight" in a) == (kind["drafter"] != "dflash" and not kind.get("shares_head", False))
    assert config["domains"] == list(config["learned_rows"]) == [prompts_dir.name]
    assert config["learned_rows"][prompts_dir.name] > 0
    provenance = (tmp_path / "a" / "PROVENANCE.md").read_text(encoding="utf-8")
    assert f"{curves[0]['rows'][-1]:,.0f} supervised rows" in provenance and "`learning_curve.json`" in provenance
    assert "paceline train-drafter" in provenance and ('"values": [' in provenance) == ("slot_decay" in kind)
    with pytest.raises(ConfigError, match="another recipe"):
        other = dataclasses.replace(recipe, learning_rate=1e-4)
        train_drafter(target_dir, prompts_dir, tmp_path / "a", other)
    checkpoint = tmp_path / "a" / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"checkpoint\.pt is damaged .*; delete it to start again"):
        train_drafter(target_dir, prompts_dir, tmp_path / "a", recipe)
    elsewhere = tmp_path / "target"
    tiny_model("qwen3", layers=5, width=32).save_pretrained(elsewhere)
    tiny_tokenizer(64).save_pretrained(elsewhere)
    (tmp_path / "a" / "checkpoint.pt").unlink()
    with pytest.raises(ConfigError, match="was written by target"):
        train_drafter(elsewhere, prompts_dir, tmp_path / "a", recipe)


def test_what_cannot_be_trained_is_refused_before_text_is_written(tmp_path, target_dir, prompts_dir):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"draft_vocab_size must be in \[1, vocab_size\], got 1000"):
        train_drafter(target_dir, prompts_dir, out, dataclasses.replace(SHORT, draft_vocab_size=1000))
    assert list(out.iterdir()) == []
    train_drafter(target_dir, prompts_dir, out, SHORT)
    text = (out / "text.json").read_bytes()
    with pytest.raises(ConfigError, match=r"checkpoint\.pt belongs to another recipe"):
        more = dataclasses.replace(TEXT, num_tokens=900)
        train_drafter(target_dir, prompts_dir, out, dataclasses.replace(SHORT, text=more))
    assert (out / "text.json").read_bytes() == text, "with its first settings the run would go on with other batches"


def test_text_of_another_folder_is_not_taken_for_that_of_this_one(tmp_path, target_dir, prompts_dir):
    train_drafter(target_dir, prompts_dir, tmp_path / "out", SHORT)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(
        ConfigError, match=f"was written by target .* for {prompts_dir.name} with seed 1; choose another"
    ):
        train_drafter(target_dir, other, tmp_path / "out", SHORT)
    train_drafter(target_dir, None, tmp_path / "out", SHORT)  # which text to go on with is not asked


def test_the_seed_is_that_of_the_text_too(tmp_path, target_dir, prompts_dir):
    for seed in (1, 2):
        train_drafter(target_dir, prompts_dir, tmp_path / str(seed), dataclasses.replace(SHORT, seed=seed))
    one, two = ({tuple(t.token_ids) for t in stored_traces(tmp_path / seed / "text")} for seed in "12")
    assert len(one - two) > len(one) // 2


def test_a_seed_beyond_what_torch_takes_is_refused():
    for kind in (DrafterRecipe, TargetRecipe):
        with pytest.raises(ConfigError, match="seed must be in"):
            kind(seed=2**64)


def test_a_domain_that_is_named_twice_counts_once(tmp_path, target_dir):
    recipe = dataclasses.replace(SHORT, domains=("code", "code"))
    first = train_drafter(target_dir, None, tmp_path, recipe)
    assert train_drafter(target_dir, None, tmp_path, recipe) == first and list(first) == ["code"]


def test_another_models_folder_is_no_place_for_a_drafter(tmp_path, target_dir, prompts_dir):
    config = (target_dir / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"out must be a new folder .* which holds another model's config"):
        train_drafter(target_dir, prompts_dir, target_dir, SHORT)
    assert (target_dir / "config.json").read_bytes() == config and not (target_dir / "text").exists()


def test_a_folder_in_which_another_training_is_at_work_is_refused(tmp_path, target_dir, prompts_dir):
    def begin_another(done, total, info):
        if info["phase"] == "train":
            with pytest.raises(ConfigError, match="out must not be a folder that another training writes now"):
                train_drafter(target_dir, prompts_dir, tmp_path, dataclasses.replace(SHORT, drafter="specblock"))

    train_drafter(target_dir, prompts_dir, tmp_path, SHORT, progress=begin_another)
    with pytest.raises(ConfigError, match="belongs to another recipe"):
        train_drafter(target_dir, prompts_dir, tmp_path, dataclasses.replace(SHORT, drafter="specblock"))


@pytest.mark.parametrize("name", ["text.json", "held_out.json"])
def test_a_damaged_record_of_the_text_is_refused(tmp_path, target_dir, prompts_dir, name):
    for damaged in (b"{", b"[]", b"{}", b"\xff"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"{name} is damaged; delete it, and"):
            train_drafter(target_dir, prompts_dir, tmp_path, SHORT)


def test_a_checkpoint_of_another_kind_of_training_is_refused(tmp_path, target_dir, prompts_dir):
    for state in ({"step": 3, "recipe": "{}"}, torch.zeros(2)):
        torch.save(state, tmp_path / "checkpoint.pt")
        with pytest.raises(ConfigError, match=r"checkpoint\.pt belongs to another kind of training; delete it"):
            train_drafter(target_dir, prompts_dir, tmp_path, SHORT)


def test_text_that_is_gone_or_teaches_nothing_is_said_so(tmp_path, target_dir, prompts_dir):
    train_drafter(target_dir, prompts_dir, tmp_path / "a", SHORT)
    shutil.rmtree(tmp_path / "a" / "text")
    with pytest.raises(ConfigError, match=r"a/text must hold a request .*; delete .*a/text\.json"):
        train_drafter(target_dir, prompts_dir, tmp_path / "a", SHORT)
    text = dataclasses.replace(TEXT, num_tokens=10, max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"b/text must hold a request that the target answered with 2 tokens or more"):
        train_drafter(target_dir, prompts_dir, tmp_path / "b", dataclasses.replace(SHORT, text=text))


def stored_traces(folder):
    store = TraceStore(folder)
    return [t for s in sorted(store.list_shards(), key=lambda s: s.shard_id) for t in store.read_shard(s.shard_id)]


def test_the_written_weights_are_the_best_on_a_held_out_sample_that_the_report_leaves_out(
    tmp_path, target_dir, prompts_dir
):
    text = dataclasses.replace(TEXT, num_tokens=100)
    recipe = DrafterRecipe(
        drafter="jetspec", domains=(), text=text, held_out_tokens=200, validation_tokens=60, epochs=8.0, batch_rows=96,
        learning_rate=0.05, validate_every=2, num_nodes=12,
    )  # fmt: skip
    (numbers,) = train_drafter(target_dir, prompts_dir, tmp_path, recipe).values()
    curve, target = read_validation(tmp_path), load_target_handle(target_dir)
    assert len(set(curve["acceptance_length"])) > 1, "the rate is high enough for the run to go up and down"
    best = max(range(len(curve["step"])), key=lambda i: (curve["acceptance_length"][i], -curve["nll"][i]))
    assert f"those after step {curve['step'][best]:.0f}," in (tmp_path / "PROVENANCE.md").read_text(encoding="utf-8")
    learned, traces = (stored_traces(tmp_path / name) for name in ("text", "held_out"))
    chosen, rest = validation_split(traces, recipe.validation_tokens)
    (others,) = rest.values()
    assert {t.request_id for t in chosen}.isdisjoint(t.request_id for t in others)
    model = build_model(*read_drafter_files(tmp_path))
    length = replayed_length(chosen, replay(model, target, chosen, recipe.num_nodes))
    assert length == pytest.approx(curve["acceptance_length"][best], rel=1e-3)
    tables = TargetTables.of(target, torch.device("cpu"))
    again = evaluate(
        model, tables, requests_like(others, learned, others[0].bucket), training_family("jetspec").complete(recipe)
    )
    assert numbers["trained_nll"] == pytest.approx(again["nll"], rel=1e-3)


def test_the_training_requests_that_are_judged_are_of_the_domain_end_alike_and_lie_all_over_it():
    def request(name, bucket, end):
        return RequestTrace(
            request_id=name, bucket=bucket, temperature=0.0, prompt_len=3, token_ids=[5, 6, end, 8, 9], features=None,
            topk_ids=None, topk_logprobs=None, target_version="t",
        )  # fmt: skip

    kept = [request(f"k{i}", "a", 7) for i in range(3)]
    learned = [request(f"{b}{end}-{i}", b, end) for i in range(9) for b in "ab" for end in (7, 4)]
    assert [t.request_id for t in requests_like(kept, learned, "a")] == ["a7-0", "a7-3", "a7-6"]
    assert [t.request_id for t in requests_like(kept, learned[:4], "a")] == ["a7-0"] and requests_like(
        kept, [], "a"
    ) == []


def test_validation_takes_a_share_of_every_domain_and_leaves_the_rest():
    def request(name, bucket, num_outputs):
        tokens = list(range(3 + num_outputs))
        return RequestTrace(
            request_id=name, bucket=bucket, temperature=0.0, prompt_len=3, token_ids=tokens, features=None, topk_ids=None,
            topk_logprobs=None, target_version="t",
        )  # fmt: skip

    traces = [request(f"a{i}", "a", 50) for i in range(8)] + [request(f"b{i}", "b", 5) for i in range(4)]
    traces.append(request("c", "c", 9))
    chosen, rest = validation_split(traces, 300)
    assert [t.request_id for t in chosen] == ["a0", "a1", "b0", "b1", "c"]
    assert {d: [t.request_id for t in kept] for d, kept in rest.items()} == {
        "a": [f"a{i}" for i in range(2, 8)], "b": ["b2", "b3"], "c": ["c"],
    }  # fmt: skip


def test_the_best_weights_accept_most_then_have_the_lowest_nll_and_leave_the_model_as_it_is():
    model, best = torch.nn.Linear(1, 1, bias=False), BestWeights()
    with best.placed_in(model):
        assert best.step is None
    for step, (length, nll) in enumerate([(2.0, 1.0), (2.5, 1.2), (2.5, 1.1), (2.4, 0.5), (2.5, 1.1)]):
        torch.nn.init.constant_(model.weight, step)
        best.offer(model, step, nll=nll, acceptance_length=length)
    with pytest.raises(StopHereError), best.placed_in(model):
        assert (best.step, model.weight.item()) == (2, 2.0)
        raise StopHereError
    assert model.weight.item() == 4.0


def test_a_drafter_that_nobody_knows_or_cannot_be_is_refused(tmp_path, target_dir, prompts_dir):
    recipe = DrafterRecipe(drafter="eagle9", domains=(), text=TEXT)
    with pytest.raises(ConfigError, match=r"drafter must be one of specblock, eagle3.*got 'eagle9'"):
        train_drafter(target_dir, prompts_dir, tmp_path / "a", recipe)
    assert not (tmp_path / "a").exists()
    family, target = training_family("eagle3"), load_target_handle(target_dir)
    deep = family.complete(DrafterRecipe(num_layers=2))
    with pytest.raises(ConfigError, match="must be 1, got 2"):
        family.make_config(target, target_shape(target_dir), deep)
    shaped = family.make_config(target, target_shape(target_dir), family.complete(DrafterRecipe(num_slots=2)))
    assert (shaped.num_slots, shaped.hidden_size, shaped.feature_size) == (2, 32, 96)


def test_each_part_of_specblock_is_left_out_by_its_name(target_dir):
    family, target, shape = training_family("specblock"), load_target_handle(target_dir), target_shape(target_dir)
    fields = ("has_shift", "inherits_hidden", "has_valid_prefix", "has_rank_head")

    def switches(*without):
        recipe = family.complete(DrafterRecipe(without=without))
        config = family.make_config(target, shape, recipe)
        assert family.held_out_loss(recipe.loss).has_valid_prefix, "held-out numbers mean the same for every ablation"
        return [getattr(recipe.loss if name == "has_valid_prefix" else config, name) for name in fields]

    names = ("shift", "inheritance", "valid-prefix", "rank-head")
    assert switches() == [True] * 4 and switches(*names) == [False] * 4
    for i, name in enumerate(names):
        assert switches(name) == [j != i for j in range(4)]
    with pytest.raises(
        ConfigError, match=r"among shift, inheritance, valid-prefix, rank-head for specblock drafters.*'shifts'"
    ):
        family.complete(DrafterRecipe(without=("shift", "shifts")))


@pytest.mark.parametrize("name", ["eagle3", "jetspec", "dflash"])
def test_a_family_without_such_parts_leaves_none_out(name):
    with pytest.raises(ConfigError, match=f"without must be left out for {name} drafters, got 'shift'"):
        training_family(name).complete(DrafterRecipe(drafter=name, without=("shift",)))


def test_an_ablation_on_the_projects_own_text_says_what_it_used_and_left_out(tmp_path, target_dir):
    recipe = DrafterRecipe(
        domains=("code",), text=TEXT, held_out_tokens=60, epochs=1.0, batch_rows=96, without=("shift", "valid-prefix"),
        learning_rate=5e-4,
    )  # fmt: skip
    train_drafter(target_dir, None, tmp_path / "a", recipe)
    drafter = load_drafter(tmp_path / "a", load_target_handle(target_dir))
    assert (
        drafter.caps.name == "specblock" and not json.loads((tmp_path / "a" / "config.json").read_text())["has_shift"]
    )
    provenance = (tmp_path / "a" / "PROVENANCE.md").read_text(encoding="utf-8")
    assert "templates written by this project" in provenance and "Puzzles" not in provenance
    assert '"has_valid_prefix": false' in provenance and '"learning_rate": 0.0005' in provenance
    (tmp_path / "data").mkdir()
    train_drafter(target_dir, tmp_path / "data", tmp_path / "a", recipe)
    again = (tmp_path / "a" / "PROVENANCE.md").read_text(encoding="utf-8")
    assert "Puzzles" not in again, "the text is the one of the first call"


def test_puzzles_are_a_source_only_with_a_data_folder(tmp_path):
    assert "Puzzles" in corpus.licence("code", tmp_path) and "Puzzles" not in corpus.licence("code", None)
    assert corpus.licence("math", tmp_path).startswith("GSM8K")
