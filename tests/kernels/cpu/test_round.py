"""Claims of kernels/cpu: the native forward equals the modules' one, and its rows depend on nothing but their own context."""

import errno
import itertools
import os
import re
import shutil
import time

import pytest
import torch

from paceline.kernels.cpu import build, library
from paceline.kernels.cpu.library import ISA_VARIABLE, ISAS, choose_isa, load_library, pack_weight
from paceline.serving.target_model.model import TargetBatch, TargetModel
from paceline.serving.target_model.native import new_native
from tests.helpers.fakes import tiny_model, tiny_tokenizer

FOUND = [] if load_library() is None else [isa for isa in ISAS if choose_isa(isa) == isa]
PAGE = 4
# width, heads, KV heads, head size, layers: widths that fill no panel, one head, and a head size of several vectors
SHAPES = [(48, 3, 1, 16, 3), (112, 6, 3, 32, 2), (32, 1, 1, 48, 2), (64, 8, 2, 128, 2), (80, 2, 2, 80, 1)]
pytestmark = pytest.mark.skipif(not FOUND, reason="needs the compiled library: python -m paceline.kernels.cpu.build")


def make_target(shape, dtype, kind="qwen3", seed=0) -> TargetModel:
    width, heads, kv_heads, head_dim, layers = shape
    model = tiny_model(
        kind,
        vocab=203,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        seed=seed,
        dtype=dtype,
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(dtype))
    return TargetModel.from_model(model, tiny_tokenizer(), tap_layers=(0, layers - 1, 0), fast_path=False)


def make_batch(rng: torch.Generator, sizes, *, is_tree: bool, logit_rows=None) -> tuple[TargetBatch, int]:
    """Requests of (rows, context) on pages in random order; returns the pool's pages, too."""
    counts = [-(-(rows + context) // PAGE) for rows, context in sizes]
    pages = torch.randperm(sum(counts) + 3, generator=rng)
    tables, start = [], 0
    for count in counts:
        own = pages[start : start + count]
        tables.append((own[:, None] * PAGE + torch.arange(PAGE)).reshape(-1))
        start += count
    longest = max(context for _, context in sizes)
    table = torch.zeros(len(sizes), longest, dtype=torch.int64)
    positions, out_rows, width = [], [], max(rows for rows, _ in sizes)
    ancestors = torch.zeros(sum(rows for rows, _ in sizes), width, dtype=torch.bool)
    at = 0
    for i, (rows, context) in enumerate(sizes):
        table[i, :context] = tables[i][:context]
        out_rows.append(tables[i][context : context + rows])
        for row in range(rows):
            parent = int(torch.randint(row, (1,), generator=rng)) if is_tree and row else row - 1
            if row:
                ancestors[at + row] = ancestors[at + parent]
            ancestors[at + row, row] = True
            positions.append(context + int(ancestors[at + row].sum()) - 1)
        at += rows
    bounds = [0, *itertools.accumulate(rows for rows, _ in sizes)]
    return TargetBatch(
        token_ids=torch.randint(203, (at,), generator=rng), positions=torch.tensor(positions), cu_rows=torch.tensor(bounds),
        context_lens=torch.tensor([context for _, context in sizes]), slot_table=table, out_rows=torch.cat(out_rows),
        ancestors=ancestors if is_tree else None, logit_rows=logit_rows,
    ), len(pages)  # fmt: skip


def fresh_pool(target: TargetModel, num_pages: int, seed: int = 1):
    pool = target.new_kv_pool(num_pages, PAGE, 0)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def run(native, batch: TargetBatch, pool):
    return native.run(
        batch.token_ids, batch.positions, batch.cu_rows, batch.context_lens, batch.slot_table, batch.out_rows,
        batch.ancestors, batch.logit_rows, pool.data,
    )  # fmt: skip


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("isa", FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_taps_and_kv_are_those_of_the_modules(shape, dtype, isa):
    """In float32 up to the order of sums; in bfloat16 no further from the float32 result than the modules in bfloat16."""
    kind = "llama" if shape[1] == 3 else "qwen3"
    target, exact = make_target(shape, dtype, kind), make_target(shape, dtype, kind)
    exact = TargetModel.from_model(exact.model.float(), tiny_tokenizer(), tap_layers=target.tap_layers, fast_path=False)
    native, rng = new_native(target.model, target.tap_layers, isa), torch.Generator().manual_seed(3)
    for sizes, is_tree in [
        ([(1, 0)], True), ([(1, 37)], True), ([(20, 19)], False), ([(9, 33)], True), ([(35, 5), (1, 64), (7, 0)], True),
        ([(3, 11), (40, 16)], False),
    ]:  # fmt: skip
        num_rows = sum(rows for rows, _ in sizes)
        wanted = torch.tensor([num_rows - 1, 0, num_rows // 2]) if num_rows > 8 else None
        batch, num_pages = make_batch(rng, sizes, is_tree=is_tree, logit_rows=wanted)
        pools = [fresh_pool(t, num_pages) for t in (target, target, exact)]
        pools[2].data.copy_(pools[0].data)
        modules, expected = target.forward(batch, pools[1]), exact.forward(batch, pools[2])
        logits, tapped = run(native, batch, pools[0])
        assert logits.shape == expected.logits.shape and tapped.dtype == dtype
        for ours, theirs, right in (
            (logits, modules.logits, expected.logits), (tapped, modules.features, expected.features),
            *[tuple(pool.data for pool in pools)],
        ):  # fmt: skip
            assert distance(ours, right) < max(1.1 * distance(theirs, right), 5e-6)


@pytest.mark.parametrize("isa", FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tree", [True, False], ids=["tree", "prompt"])
def test_rows_are_bit_for_bit_those_of_plain_decoding(is_tree, dtype, isa):
    """Whatever is computed beside a row, wherever its context lies, and on however many threads."""
    target = make_target(SHAPES[1], dtype)
    native, rng = new_native(target.model, target.tap_layers, isa), torch.Generator().manual_seed(4)
    sizes = [(9, 21), (1, 40), (18, 15), (5, 61), (3, 96), (40, 26)]  # attention takes keys in by the 32
    batch, num_pages = make_batch(rng, sizes, is_tree=is_tree)
    pool = fresh_pool(target, num_pages)
    found, threads = [], torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        again = fresh_pool(target, num_pages)
        logits, tapped = run(native, batch, again)
        found.append((logits.clone(), tapped.clone(), again.data.clone()))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
    start = 0
    for i, (rows, context) in enumerate(sizes):
        own = batch.out_rows[start : start + rows]
        for row in range(rows):
            pool.data.copy_(fresh_pool(target, num_pages).data)
            path = torch.arange(row + 1) if batch.ancestors is None else batch.ancestors[start + row].nonzero()[:, 0]
            for depth, node in enumerate(path.tolist()):  # one token after the other
                at = slice(start + node, start + node + 1)
                one = TargetBatch(
                    token_ids=batch.token_ids[at], positions=batch.positions[at], cu_rows=torch.tensor([0, 1]),
                    context_lens=torch.tensor([context + depth]),
                    slot_table=torch.cat((batch.slot_table[i, :context], own[path[:depth]]))[None],
                    out_rows=batch.out_rows[at], ancestors=torch.ones(1, 1, dtype=torch.bool),
                )  # fmt: skip
                logits, tapped = run(native, one, pool)
            assert torch.equal(logits[0], found[0][0][start + row]) and torch.equal(tapped[0], found[0][1][start + row])
        start += rows


@pytest.mark.parametrize("isa", FOUND)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.int8])
def test_rows_are_bit_for_bit_the_same_in_tiles_of_every_height(weights, isa):
    target = make_target(SHAPES[1], torch.bfloat16 if weights == torch.int8 else weights)
    native = new_native(target.model, target.tap_layers, isa, is_int8=weights == torch.int8)
    batch, num_pages = make_batch(torch.Generator().manual_seed(7), [(1, 5 + i) for i in range(31)], is_tree=False)

    def rows(first: int, last: int) -> TargetBatch:
        at = slice(first, last)
        return TargetBatch(
            token_ids=batch.token_ids[at], positions=batch.positions[at], cu_rows=torch.arange(last - first + 1),
            context_lens=batch.context_lens[at], slot_table=batch.slot_table[at], out_rows=batch.out_rows[at],
        )  # fmt: skip

    pool = fresh_pool(target, num_pages)
    alone = torch.cat([run(native, rows(i, i + 1), pool)[0].clone() for i in range(31)])
    for count in range(2, 32):
        assert torch.equal(run(native, rows(0, count), pool)[0], alone[:count]), count


def test_all_instruction_sets_agree():
    target, rng = make_target(SHAPES[1], torch.float32), torch.Generator().manual_seed(5)
    batch, num_pages = make_batch(rng, [(9, 21), (1, 40)], is_tree=True)
    results = [run(new_native(target.model, (), isa), batch, fresh_pool(target, num_pages))[0] for isa in FOUND]
    for other in results[1:]:
        assert distance(other, results[0]) < 2e-6


@pytest.mark.parametrize("isa", FOUND)
def test_int8_weights_are_exactly_the_integers_times_their_scales(isa):
    """Against the modules with the same products as float32 weights; what is left is the inputs' rounding to bfloat16."""
    target = make_target(SHAPES[1], torch.bfloat16)
    native, rng = new_native(target.model, target.tap_layers, isa, is_int8=True), torch.Generator().manual_seed(6)
    model = make_target(SHAPES[1], torch.bfloat16).model.float()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().amax(1, keepdim=True) / 127
                module.weight.copy_((module.weight / scale).round() * scale)
    exact = TargetModel.from_model(model, tiny_tokenizer(), tap_layers=target.tap_layers, fast_path=False)
    for sizes in ([(1, 37)], [(9, 21), (1, 40)]):
        batch, num_pages = make_batch(rng, sizes, is_tree=True)
        logits, _ = run(native, batch, fresh_pool(target, num_pages))
        pool = fresh_pool(exact, num_pages)
        pool.data.copy_(fresh_pool(target, num_pages).data)
        assert distance(logits, exact.forward(batch, pool).logits) < 1e-2


@pytest.mark.parametrize("isa", FOUND)
@pytest.mark.parametrize(("size", "count"), [(1, 1), (15, 4), (16, 16), (1003, 10), (4096, 8)])
def test_ranks_are_those_of_a_whole_sort(size, count, isa, monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, isa)
    library._rank_function.cache_clear()
    rng = torch.Generator().manual_seed(7)
    padded = 4 * torch.randn(9, size + 5, generator=rng)
    padded[3, :size] = 1.0  # ties: the first is the better
    padded[4, : size // 2] = float("-inf")
    logits, scale = padded[:, :size], 0.1 + torch.rand(9, generator=rng)
    values, ids, lse = library.rank_rows(logits, count, scale)
    scaled = logits * scale[:, None]
    expected = scaled.sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(values, expected.values[:, :count], rtol=1e-6, atol=0)
    finite = expected.values[:, :count].isfinite()
    assert torch.equal(ids[finite], expected.indices[:, :count][finite])
    torch.testing.assert_close(lse, scaled.logsumexp(-1), rtol=1e-6, atol=1e-6)
    library._rank_function.cache_clear()


def test_a_forked_process_has_threads_of_its_own():
    target, rng = make_target(SHAPES[0], torch.float32), torch.Generator().manual_seed(8)
    native, threads = new_native(target.model, ()), torch.get_num_threads()
    batch, num_pages = make_batch(rng, [(9, 21)], is_tree=True)
    torch.set_num_threads(2)
    expected, _ = run(native, batch, fresh_pool(target, num_pages))
    pid = os.fork()
    if pid == 0:  # the parent's threads are not here
        got, _ = run(native, batch, fresh_pool(target, num_pages))
        os._exit(0 if torch.equal(got, expected) else 1)
    torch.set_num_threads(threads)
    for _ in range(200):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise AssertionError("the forked process waits for threads that it does not have")
    assert status == 0


def test_packing_loses_no_weight():
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        weight = torch.randint(-100, 100, (37, 70)).to(dtype)
        packed = pack_weight(weight)
        order = packed if dtype == torch.float32 else packed.transpose(2, 3).flatten(1, 2)  # (panels, inputs, 16)
        assert torch.equal(order.transpose(1, 2).reshape(-1, order.shape[1])[:37, :70], weight)
        assert packed.count_nonzero() == weight.count_nonzero()


def test_without_the_library_the_torch_path_serves(monkeypatch):
    monkeypatch.setenv(ISA_VARIABLE, "none")
    target = TargetModel.from_model(tiny_model(), tiny_tokenizer())
    assert target.forward_name == "fused" and target.pads_requests
    monkeypatch.delenv(ISA_VARIABLE)
    target = TargetModel.from_model(tiny_model(), tiny_tokenizer())
    assert target.forward_name == f"native-{choose_isa()}" and not target.pads_requests


def test_a_name_that_no_instruction_set_has_is_said_once_and_changes_nothing(monkeypatch, caplog):
    monkeypatch.setenv(ISA_VARIABLE, "")
    best = choose_isa()
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    assert [choose_isa(), choose_isa()] == [best, best]
    assert [r.message.count("avx1024") for r in caplog.records] == [1]


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match="pip install ziglang"):
        build.build(tmp_path)
    for command, match in (("/bin/false", "failed"), (str(tmp_path / "g++-0"), "cannot be run")):
        monkeypatch.setenv("CXX", command)
        with pytest.raises(build.BuildError, match=match):
            build.build(tmp_path)


def _compiler(path, *refused):
    """A compiler that refuses some flags and else writes an empty file."""
    path.write_text(
        "#!/bin/sh\nfor word; do\n"
        + f'case $word in {"|".join(refused)}) echo "$word is unknown" >&2; exit 1;; esac\n'
        + '[ "$before" = -o ] && : > "$word"\nbefore=$word\ndone\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.skipif(build.platform.machine() != "x86_64", reason="needs a machine with several instruction sets")
def test_an_older_compiler_leaves_out_the_instruction_sets_that_it_does_not_know(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CXX", str(_compiler(tmp_path / "old", "-mamx-tile", "-static-libstdc++")))
    assert build.build(tmp_path / "out").is_file()
    assert re.findall(r"without (\w+)", capsys.readouterr().err) == ["avx512_bf16"]
    monkeypatch.setenv("CXX", str(_compiler(tmp_path / "older", "-mavx2")))
    with pytest.raises(build.BuildError, match="-mavx2 is unknown"):
        build.build(tmp_path / "out")
    monkeypatch.delenv("CXX")
    for compilers, left_out in (
        (("old", "new"), []),
        (("old", "older"), ["avx512_bf16"]),
        (("older", "old"), ["avx512_bf16"]),
    ):
        monkeypatch.setattr(build, "find_compilers", lambda names=compilers: [[str(tmp_path / n)] for n in names])
        _compiler(tmp_path / "new", "-none")
        build.build(tmp_path / "out")
        assert re.findall(r"without (\w+)", capsys.readouterr().err) == left_out


def test_what_fails_with_flags_that_the_compiler_knows_is_no_older_compiler(monkeypatch, tmp_path):
    killed = _compiler(tmp_path / "killed", "-none")
    killed.write_text(
        killed.read_text().replace("for word", 'case "$*" in *-mamx-tile*-c*) exit 137;; esac\nfor word', 1)
    )
    monkeypatch.setenv("CXX", str(killed))
    with pytest.raises(build.BuildError, match="failed"):
        build.build(tmp_path / "out")


def test_a_folder_that_cannot_be_written_or_locked_is_no_traceback(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(build.BuildError, match="cannot be written"):
        build.provide(tmp_path / "file")
    blocked = tmp_path / "blocked" / build.NAME
    blocked.mkdir(parents=True)  # the last step fails
    with pytest.raises(build.BuildError, match="cannot be written"):
        build.provide(blocked.parent)
    assert list(blocked.parent.iterdir()) == [blocked]

    def refuse(*args):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)  # as NFS does
    assert build.provide(tmp_path / "out").is_file()


def test_a_library_of_these_sources_is_copied_and_any_other_compiled_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/bin/false")
    assert build.provide(tmp_path / "copy").read_bytes() == (build.HERE / build.NAME).read_bytes()
    for folder, changed in (("of other sources", "round.cpp"), ("of another machine", build.NAME)):
        sources = tmp_path / folder
        shutil.copytree(build.HERE, sources)
        (sources / changed).write_text("something else")
        with monkeypatch.context() as patch, pytest.raises(build.BuildError, match="failed"):
            patch.setattr(build, "HERE", sources)
            build.provide(tmp_path / "out")
