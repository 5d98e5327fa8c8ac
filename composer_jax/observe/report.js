// The episode viewer. Episode text comes from a model and from programs it ran: it is inserted as text nodes only.
"use strict";
(() => {
  const episodes = JSON.parse(document.getElementById("episode-data").textContent);
  const STAGES = { before: "before RL", after: "after RL", rl: "during RL" };
  const WHO = { prompt: "Prompt", assistant: "Model", tool: "Tool", summary_request: "Summary request", summary: "Summary", carry: "Carried over" };
  const list = document.getElementById("list");
  const detail = document.getElementById("episode");
  const form = document.getElementById("filters");
  let shown = [];
  let current = -1;

  // Builds an element; children are elements or values that become text.
  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "onclick") node.addEventListener("click", value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat()) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : String(child));
    }
    return node;
  }

  // Control and direction characters become visible symbols.
  function visible(text) {
    return String(text)
      .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
      .replace(/[\u007f\u202a-\u202e\u2066-\u2069]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
  }

  const count = (n) => Number(n || 0).toLocaleString("en-US");
  const words = (name) => visible(name).replaceAll("_", " ");
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const tokensOf = (messages) => sum(messages.map((m) => m.tokens));
  const plural = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;

  function rewardClass(reward) {
    if (reward === null) return "none";
    return reward >= 1 ? "full" : reward > 0 ? "part" : "zero";
  }
  const rewardWords = (reward) => (reward === null ? "not graded" : String(Math.round(reward * 1000) / 1000));
  const REWARDS = { full: "passed (1)", part: "in between", zero: "failed (0)", none: "not graded" };

  // --- filters ---
  const FILTERS = [
    ["stage", "Stage", (e) => e.stage, (v) => STAGES[v] || v],
    ["family", "Family", (e) => e.family, words],
    ["outcome", "Outcome", (e) => e.outcome, words],
    ["reward", "Reward", (e) => rewardClass(e.reward), (v) => REWARDS[v]],
    ["condition", "Compaction", (e) => e.condition, words],
    ["splices", "Summaries", (e) => (e.segments.length > 1 ? "some" : "none"), (v) => (v === "some" ? "at least one" : "none")],
  ];
  const selects = FILTERS.map(([name, label, value, show]) => {
    const values = [...new Set(episodes.map(value))].sort();
    const select = el("select", { name }, el("option", { value: "" }, "all"), values.map((v) => el("option", { value: v }, show(v))));
    if (values.length > 1) form.append(el("label", {}, label, select));
    return select;
  });
  const search = el("input", { type: "search", name: "search", placeholder: "task or instruction" });
  form.append(el("label", {}, "Search", search));
  form.addEventListener("input", () => applyFilters());
  form.addEventListener("submit", (event) => event.preventDefault());

  function applyFilters() {
    const wanted = search.value.trim().toLowerCase();
    shown = [];
    episodes.forEach((episode, index) => {
      const fits = FILTERS.every(([, , value], i) => !selects[i].value || value(episode) === selects[i].value);
      if (fits && (!wanted || `${episode.task_id} ${episode.instruction}`.toLowerCase().includes(wanted))) shown.push(index);
    });
    const graded = shown.filter((i) => episodes[i].reward !== null);
    const mean = graded.length ? sum(graded.map((i) => episodes[i].reward)) / graded.length : 0;
    document.getElementById("matches").textContent =
      `${count(shown.length)} of ${plural(episodes.length, "episode")}` + (graded.length ? `, mean reward ${mean.toFixed(2)}` : "");
    list.replaceChildren(...shown.map(listItem));
    if (!shown.includes(current)) show(shown.length ? shown[0] : -1);
    else mark();
  }

  function listItem(index) {
    const e = episodes[index];
    const about = [e.step === null ? STAGES[e.stage] : `RL step ${e.step}`, words(e.family), words(e.outcome), plural(e.turns, "turn")];
    if (e.summaries) about.push(e.summaries === 1 ? "1 summary" : `${count(e.summaries)} summaries`);
    return el("li", {}, el("button", { type: "button", "data-index": index, onclick: () => show(index, true) },
      el("span", { class: "task" }, visible(e.task_id)),
      el("span", { class: `reward ${rewardClass(e.reward)}` }, rewardWords(e.reward)),
      el("span", { class: "about" }, about.join(" · "))));
  }

  function mark() {
    for (const button of list.querySelectorAll("button")) {
      const here = Number(button.dataset.index) === current;
      button.setAttribute("aria-current", here);
      if (here) list.scrollTop = Math.max(0, button.offsetTop - list.offsetTop - list.clientHeight / 2);
    }
  }

  // --- one episode ---
  function show(index, chosen) {
    current = index;
    mark();
    if (index < 0) {
      detail.replaceChildren(el("p", { class: "hint" }, "No episode fits these filters."));
      return;
    }
    const e = episodes[index];
    const parts = [head(e, index)];
    e.segments.forEach((messages, s) => {
      if (s > 0) parts.push(splice(e.segments[s - 1], messages, s));
      parts.push(segment(messages, s, e.segments.length));
    });
    parts.push(verdict(e));
    detail.replaceChildren(...parts);
    if (chosen) {
      history.replaceState(null, "", `#episode-${index}`);
      detail.focus({ preventScroll: true });
      if (detail.getBoundingClientRect().top < 0 || window.innerWidth <= 860) detail.scrollIntoView({ block: "start" });
    }
  }

  function fact(label, value) {
    return el("span", {}, `${label} `, el("b", {}, value));
  }

  function head(e, index) {
    const place = shown.indexOf(index);
    const versions = [...new Set(e.segments.flat().map((m) => m.version).filter((v) => v !== null))].sort((a, b) => a - b);
    const same = episodes.map((other, i) => [other, i]).filter(([other, i]) => other.task_id === e.task_id && i !== index);
    const move = (by, label) => el("button", { type: "button", disabled: !(place + by in shown), onclick: () => show(shown[place + by], true) }, label);
    return el("div", { class: "card head" },
      el("h3", {}, visible(e.task_id)),
      el("p", { class: "line" },
        fact("stage", e.step === null ? STAGES[e.stage] : `RL step ${e.step}`),
        fact("family", words(e.family)), fact("split", e.split), fact("seed", e.seed),
        fact("compaction", words(e.condition)),
        versions.length > 0 && fact("weights", versions.length > 1 ? `v${versions[0]} to v${versions.at(-1)}` : `v${versions[0]}`)),
      el("p", { class: "line" },
        el("span", { class: `reward ${rewardClass(e.reward)}` }, `reward ${rewardWords(e.reward)}`),
        fact("outcome", words(e.outcome)), fact("turns", e.turns),
        fact("tokens", count(e.tokens)), fact("sampled", count(e.sampled_tokens)), fact("in summaries", count(e.summary_tokens))),
      map(e.segments),
      el("div", { class: "steps" }, move(-1, "← previous"), move(1, "next →")),
      same.length > 0 && el("div", { class: "siblings" }, "same task:", same.slice(0, 16).map(([other, i]) =>
        el("button", { type: "button", onclick: () => show(i, true) },
          `${other.step === null ? STAGES[other.stage] : "RL step " + other.step}, seed ${other.seed}: ${other.reward === null ? "" : "reward "}${rewardWords(other.reward)}`)),
        same.length > 16 && `and ${same.length - 16} more`));
  }

  // One bar a segment, one piece a message, as wide as it has tokens: where the context went.
  function map(segments) {
    const longest = Math.max(1, ...segments.map(tokensOf));
    return el("div", { class: "map" }, segments.map((messages, s) => {
      const track = el("div", { class: "track", role: "img", "aria-label": `${count(tokensOf(messages))} tokens in segment ${s + 1}` });
      for (const m of messages) {
        const kind = m.kind === "summary" || m.kind === "carry" ? m.kind : m.sampled ? "sampled" : "";
        const piece = el("i", { class: kind, title: `${WHO[m.kind]}: ${plural(m.tokens, "token")}` });
        piece.style.width = `${(100 * m.tokens) / longest}%`;
        track.append(piece);
      }
      return el("div", { class: "row" }, el("span", {}, `segment ${s + 1}`), track, el("span", {}, plural(tokensOf(messages), "token")));
    }));
  }

  function splice(before, after, s) {
    const from = tokensOf(before), to = tokensOf(after.filter((m) => m.kind === "prompt" || m.kind === "carry"));
    const summary = tokensOf(before.filter((m) => m.kind === "summary"));
    return el("div", { class: "splice" }, el("b", {}, "Summary splice"),
      el("span", {}, `segment ${s} closes at ${plural(from, "token")} with a summary of ${count(summary)}`),
      el("span", {}, `segment ${s + 1} opens at ${plural(to, "token")}: the task and the summary`));
  }

  function segment(messages, s, of) {
    const sampled = tokensOf(messages.filter((m) => m.sampled));
    const title = of > 1 ? `Segment ${s + 1} of ${of}: ` : "";
    return el("section", { class: "segment" },
      el("h4", {}, `${title}${plural(tokensOf(messages), "token")}, ${count(sampled)} sampled`),
      messages.map((m) => message(m, s)));
  }

  function message(m, s) {
    const tokens = el("span", { class: "tokens" }, `${plural(m.tokens, "token")}, ${m.sampled ? "sampled" : "given"}${m.version === null ? "" : `, weights v${m.version}`}`);
    if (m.kind === "prompt" && s > 0) {
      return el("div", { class: "message given" },
        el("details", {}, el("summary", {}, `Prompt again, as in segment 1 (${plural(m.tokens, "token")}, given)`), el("pre", {}, visible(m.text))));
    }
    const spliced = m.kind === "summary" || m.kind === "carry";
    const kind = spliced ? "spliced" : m.sampled ? "sampled" : "given";
    return el("div", { class: `message ${kind}` },
      el("div", { class: "top" }, el("b", { class: "who" }, WHO[m.kind] || m.kind), tokens),
      m.text.trim() && el("pre", { class: m.kind === "tool" ? "" : "prose" }, visible(m.text.replace(/\s+$/, ""))),
      !m.text.trim() && !m.calls.length && el("pre", { class: "prose" }, "(nothing)"),
      m.calls.map(call),
      (m.sampled_tokens || []).length > 0 && tokenDetails(m.sampled_tokens));
  }

  // The sampled tokens with what RL did to each, on demand.
  function tokenDetails(tokens) {
    const largest = Math.max(...tokens.map((t) => Math.abs(t.advantage || 0))) || 1;
    const pieces = tokens.map((t) => {
      const title = `log-probability ${t.logprob}; ` + (t.advantage === null ? "not trained" : `advantage ${t.advantage}`);
      const sign = t.advantage === null ? "untrained" : t.advantage > 0 ? "raised" : t.advantage < 0 ? "lowered" : "";
      const surprise = t.logprob < -3 ? "rare" : t.logprob < -0.7 ? "unsure" : "";
      const piece = el("span", { class: `token ${sign} ${surprise}`, title }, visible(t.text));
      piece.style.setProperty("--strength", `${Math.round(15 + 45 * Math.abs(t.advantage || 0) / largest)}%`);
      return piece;
    });
    return el("details", { class: "trained" }, el("summary", {}, "Tokens and advantages"),
      el("p", { class: "hint" }, "Made ", el("span", { class: "token raised" }, "more likely"), " or ",
        el("span", { class: "token lowered" }, "less likely"), ", or ", el("span", { class: "token untrained" }, "not trained"),
        ". Underlined: sampled with a probability ", el("span", { class: "token unsure" }, "below 1/2"), " or ",
        el("span", { class: "token rare" }, "below 1/20"), ". Hold the pointer over a token for its numbers."),
      el("pre", { class: "prose" }, pieces));
  }

  function call(c) {
    const asText = (value) => visible(typeof value === "string" ? value : JSON.stringify(value));
    const isObject = c.arguments !== null && typeof c.arguments === "object" && !Array.isArray(c.arguments);
    const entries = isObject ? Object.entries(c.arguments) : [["text", c.arguments]];
    return el("div", { class: "call" },
      el("div", { class: "name" }, visible(c.name || "(no name)"), entries.length ? "" : "()"),
      entries.length > 0 && el("dl", {}, entries.flatMap(([name, value]) => [
        el("dt", {}, visible(name)), el("dd", {}, el("pre", { class: name === "old" || name === "new" ? name : "" }, asText(value)))])),
      c.error && el("div", { class: "bad" }, `not carried out: ${visible(c.error)}`));
  }

  function verdict(e) {
    const parts = Object.entries(e.parts || {});
    return el("div", { class: `verdict ${rewardClass(e.reward)}` },
      el("b", {}, e.reward === null ? "Not graded" : `Reward ${rewardWords(e.reward)}`), `, ${words(e.outcome)} after ${plural(e.turns, "turn")}`,
      parts.length > 0 && el("dl", {}, parts.map(([name, value]) =>
        el("div", {}, el("dt", {}, words(name)), el("dd", {}, visible(typeof value === "string" ? value : JSON.stringify(value)))))));
  }

  applyFilters();
  const linked = /^#episode-(\d+)$/.exec(location.hash);
  if (linked && Number(linked[1]) < episodes.length) show(Number(linked[1]), true);
})();
