"""The page's own arithmetic, in the browser that runs it."""

from __future__ import annotations

import json

import pytest

from browser.conftest import until_ready


@pytest.fixture
def run(visit, served):
    """Evaluates an expression with the exports of a module in scope as `m`."""
    page = until_ready(visit(served).page)

    def run(module: str, expression: str):
        return page.evaluate(f"async () => {{ const m = await import('/static/{module}.js'); return {expression}; }}")

    return run


def test_prometheus_text_is_read(run):
    """Labels with escapes, exponents, infinities, comments; positions in their places; what is missing is null."""
    text = r"""# HELP a b
forerun:generation_tokens_total{engine="0",model_name="a\"b\\c\nd"} 1.2e+01
forerun:spec_decode_accepted_per_pos_total{engine="0",position="2"} 3.0
forerun:spec_decode_accepted_per_pos_total{engine="0",position="0"} 5.0
x_bucket{le="+Inf"} +Inf
"""
    quoted = json.dumps(text)
    assert run("prometheus", f"[...m.parse({quoted}).keys()].length") == 3
    assert (
        run("prometheus", f"m.parse({quoted}).get('forerun:generation_tokens_total')[0].labels.model_name")
        == 'a"b\\c\nd'
    )
    assert run("prometheus", f"m.snapshot(m.parse({quoted})).acceptedAt") == [5, 0, 3]
    assert run("prometheus", f"m.snapshot(m.parse({quoted})).generated") == 12
    assert run("prometheus", f"m.snapshot(m.parse({quoted})).waiting") is None


def test_rates_are_taken_over_a_window(run):
    """Between readings some seconds apart; nothing before the second reading; a restarted server begins anew."""
    make = """(() => { const h = new m.History(300, 4); const s = (n) => ({ generated: n, steps: n, alarms: [] });
      for (const [at, n] of %s) h.add(at, s(n)); return h.rates((d, t) => d.generated / t); })()"""
    assert run("prometheus", make % "[[0, 0], [2, 20], [4, 60], [6, 60]]") == [[0, None], [2, 10], [4, 15], [6, 10]]
    assert run("prometheus", make % "[[0, 50], [2, 90], [4, 5]]") == [[4, None]]
    assert len(run("prometheus", make % "[[0, 1], [200, 2], [301, 3]]")) == 2
    assert run("prometheus", "[m.ratio(1, 0), m.ratio(null, 2), m.ratio(1, 4)]") == [None, None, 0.25]


def test_axes_have_round_marks(run):
    """They begin at or below the least value and end at or above the greatest."""
    assert run("scales", "m.ticks(0, 7.3)") == [0, 2, 4, 6, 8]
    assert run("scales", "m.ticks(0, 0.9)") == [0, 0.25, 0.5, 0.75, 1]
    assert run("scales", "m.ticks(0, 0)") == [0, 1]
    assert run("scales", "m.powers(1, 30)") == [1, 2, 4, 8, 16, 32]
    assert run("scales", "[m.linear([0, 10], [100, 0])(5), m.log2([1, 16], [0, 100])(4)]") == [50, 50]
    assert run("scales", "[0, 0.01234, 12.34, 1234, 56789].map(m.short)") == ["0", "0.0123", "12.3", "1234", "56.8k"]


def test_the_first_difference_is_found(run):
    """Also where one answer is the beginning of the other."""
    assert run("race", "m.firstDifference([1, 2, 3], [1, 2, 3])") == -1
    assert run("race", "m.firstDifference([1, 2, 3], [1, 9, 3])") == 1
    assert run("race", "m.firstDifference([1, 2], [1, 2, 3])") == 2
    assert run("race", "m.firstDifference([], [])") == -1


def test_events_are_cut_out_of_any_pieces(run):
    """A stream that comes in pieces of any size, with pings between and characters cut in two."""
    found = run(
        "api",
        """await (async () => {
          const bytes = new TextEncoder().encode(': ping\\n\\ndata: {"a": "é"}\\n\\n: ping\\n\\ndata: [DONE]\\n\\n');
          const found = [];
          for (const size of [1, 3, 100]) {
            const body = new ReadableStream({ start(c) {
              for (let i = 0; i < bytes.length; i += size) c.enqueue(bytes.slice(i, i + size));
              c.close();
            } });
            const events = [];
            for await (const event of m.eventsOf(body)) events.push(event);
            found.push(events);
          }
          return found;
        })()""",
    )
    assert found == [['{"a": "é"}', "[DONE]"]] * 3


def test_a_long_answer_is_laid_out_in_parts(run):
    """Tokens of one frame are put in together; a new block begins behind a complete line and nowhere else, so that the
    text looks as it would in one piece."""
    made = run(
        "answer",
        """(() => {
          const root = document.createElement('div'), view = new m.TokenView(root), found = {};
          const token = (text, id) => ({ id, text, source: 'plain' });
          for (let i = 0; i < 300; i++) view.add([token(i % 10 === 9 ? '\\n' : ' w', i)]);
          found.before = root.childElementCount;
          view.flush();
          found.tokens = root.querySelectorAll('.token').length;
          found.text = root.textContent === view.text;
          found.blocks = [...root.children].map((block) => block.childElementCount);
          found.ends = [...root.children].every((block) => block.textContent.endsWith('\\n'));
          view.add(Array.from({ length: 200 }, (_, i) => token(' on', i)));
          view.flush();
          found.one = root.lastElementChild.childElementCount;
          return found;
        })()""",
    )
    assert made == {"before": 0, "tokens": 300, "text": True, "blocks": [70, 70, 70, 70, 20], "ends": True, "one": 220}


def test_rounds_are_drawn_once(run):
    """A column that is there stays; all are drawn anew only where a round has more boxes than any before."""
    kept = run(
        "answer",
        """(() => {
          const root = document.createElement('div'), strip = new m.RoundStrip(root), found = [];
          for (const rounds of [[[3, 1]], [[3, 1], [2, 2]], [[3, 1], [2, 2], [5, 0]]]) {
            const before = root.querySelector('g');
            strip.draw(rounds);
            found.push([root.querySelector('g') === before, root.querySelectorAll('g').length,
                        root.querySelectorAll('rect').length]);
          }
          return found;
        })()""",
    )
    assert kept == [[False, 1, 3], [True, 2, 5], [False, 3, 10]]


def test_lines_break_where_nothing_was_read(run):
    """A page that was hidden for a while does not know what happened meanwhile, and draws no line across."""
    levels = """(() => { const h = new m.History(300, 4), seen = (at) => ({ generated: 0, steps: 0, running: at });
      for (const at of [0, 2, 100, 102]) h.add(at, seen(at)); return h.levels((v) => v.running); })()"""
    assert run("prometheus", levels) == [[0, 0], [2, 2], [100, None], [100, 100], [102, 102]]


def test_a_line_break_is_marked_where_it_is(run):
    """Within a token, before each break; the mark is no text, so that what is copied is the answer."""
    made = run(
        "answer",
        """(() => {
          const view = new m.TokenView(document.createElement('div'));
          const node = view.element({ id: 1, text: '):\\n\\n  ', source: 'plain' }, 0);
          return [node.textContent, [...node.childNodes].map((child) => child.className ?? child.textContent)];
        })()""",
    )
    assert made == ["):\n\n  ", ["):", "break", "\n", "break", "\n  "]]
