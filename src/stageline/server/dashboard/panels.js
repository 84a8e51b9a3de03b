// Everything around the timeline. Each function brings one panel up to date with a view of the pipeline.

const RECENT_S = 30;
const SHARES = [
  ["busy", "computing"], ["starved", "starved: the stage before still computes"], ["in_transit", "input on its way"],
  ["blocked", "blocked: output is handed over"], ["underfilled", "idle: too little in flight"], ["unused", "idle: no requests"],
];
const BOXES = [
  ["decode", "decode"], ["prefill", "with prompt tokens"], ["sample", "sampling"], ["starved", "starved"],
  ["in_transit", "input on its way"], ["blocked", "blocked on output"], ["lane", "idle"],
];
const EVENT_NAMES = { preemption: "preemption", abort: "abort", refusal: "refused", slow_stage: "slow stage", lost: "lost", imbalance: "uneven", rebalance: "layers moved" };

const showLegend = (list, entries) => {
  for (const [kind, name] of entries) {
    const row = make("li");
    const swatch = make("span", "swatch");
    swatch.style.background = `var(--${kind === "busy" ? "decode" : kind})`;
    row.append(swatch, make("span", "", name));
    list.append(row);
  }
};

const makeNumber = () => {
  const card = make("div", "number");
  const value = make("p", "value");
  value.append(make("span", "amount"), make("span", "unit"));
  const spark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  spark.setAttribute("class", "spark");
  spark.setAttribute("viewBox", "0 0 100 26");
  spark.setAttribute("preserveAspectRatio", "none");
  spark.setAttribute("aria-hidden", "true");
  spark.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  card.append(make("p", "name"), value, make("p", "more"), spark);
  return card;
};

/** Numbers that move, with where they came from: a line over the last minutes. */
class History {
  constructor() { this.views = []; this.points = []; }

  add(view) {
    const last = this.views.at(-1);
    if (last && (view.started_s !== last.started_s || view.now_s < last.now_s)) { this.views = []; this.points = []; }
    this.views.push(view);
    while (this.views.length > 2 && view.now_s - this.views[1].now_s > RECENT_S) this.views.shift();
  }

  /** The newest view at least so many seconds old, or the oldest there is. */
  before(agoS) {
    const now = this.views.at(-1).now_s;
    return this.views.findLast((view) => now - view.now_s >= agoS) || this.views[0];
  }

  rate(field, agoS) {
    const now = this.views.at(-1), then = this.before(agoS);
    const elapsed = now.now_s - then.now_s;
    return elapsed > 0 ? (now.requests[field] - then.requests[field]) / elapsed : 0;
  }

  /** Latencies of the last half minute; of the whole run if there are none. */
  latency(field) {
    const now = this.views.at(-1).requests[field];
    const recent = difference(now, this.views[0].requests[field]);
    return total(recent) ? recent : now;
  }

  point(values) {
    this.points.push(values);
    if (this.points.length > 240) this.points.shift();
  }
}

const latencyNumber = (name, histogram) => {
  const [median, high, highest] = [0.5, 0.9, 0.99].map((share) => percentile(histogram, share));
  if (median === null) return [name, "–", "", "no token yet", 0];
  const [amount, unit] = seconds(median).split(" ");
  return [name, amount, `${unit} median`, `p90 ${seconds(high)}\np99 ${seconds(highest)}`, median];
};

const showNumbers = (view, history) => {
  const output = history.rate("num_generation_tokens", 2), prompt = history.rate("num_prompt_tokens", 5);
  const { queue, window: flight, kv } = view;
  const used = kv.num_used_blocks / kv.num_blocks;
  const finished = view.requests.num_finished;
  const numbers = [
    ["Throughput", rate(output), "tokens/s", `prompts ${rate(prompt)} tokens/s`, output],
    latencyNumber("TTFT", history.latency("ttft_s")),
    latencyNumber("ITL", history.latency("itl_s")),
    ["Requests", count(queue.num_running), "running", `${count(queue.num_waiting)} waiting · ${count(finished)} done`, queue.num_running],
    ["In flight", count(flight.group_rows.length), `of ${flight.size}`, "microbatches", flight.group_rows.length],
    ["Bubbles", Math.round(view.bubble_fraction * 100).toString(), "%", `KV cache ${percent(used)} used`, view.bubble_fraction],
  ];
  history.point(numbers.map((number) => number[4]));
  children(byId("numbers"), numbers.length, makeNumber).forEach((card, at) => {
    const [name, amount, unit, more] = numbers[at];
    setText(card.querySelector(".name"), name);
    setText(card.querySelector(".amount"), amount);
    setText(card.querySelector(".unit"), unit);
    setText(card.querySelector(".more"), more);
    drawLine(card.querySelector("polyline"), history.points.map((values) => values[at]));
  });
};

const drawLine = (line, values) => {
  const top = Math.max(...values, 1e-9);
  const step = 100 / Math.max(1, values.length - 1);
  line.setAttribute("points", values.map((value, at) => `${(at * step).toFixed(1)},${(24.5 - (value / top) * 23).toFixed(1)}`).join(" "));
};

const showAdvice = (view) => {
  const box = byId("advice-title").parentElement;
  const ran = view.slowest_stage !== null;
  const slowest = ran ? view.stages[view.slowest_stage] : null;
  box.dataset.has = view.advice.length ? "advice" : ran ? "balance" : "nothing";
  setText(byId("slowest"), slowest
    ? `s${slowest.stage_index} sets the pace: busy ${percent(slowest.shares.busy)}, ${seconds(slowest.step_s)} per microbatch`
    : "Nothing ran in the last seconds");
  const lines = view.advice.length ? view.advice : [ran ? "The stages are balanced; nothing to change." : "Send a request to see the stages at work."];
  children(byId("advice"), lines.length, () => make("li")).forEach((row, at) => setText(row, lines[at]));
};

const makeShare = () => {
  const row = make("li");
  const bar = make("span", "bar");
  for (const [kind] of SHARES) bar.append(make("span", kind));
  row.append(make("span", "stage"), bar, make("span", "percent"));
  return row;
};

const showShares = (view) => {
  const list = byId("shares");
  list.classList.toggle("many", view.stages.length > 12);
  children(list, view.stages.length, makeShare).forEach((row, at) => {
    const stage = view.stages[at];
    const shares = stage.shares || { unused: 1 };
    row.classList.toggle("slow", view.stages.length > 1 && at === view.slowest_stage);
    setText(row.querySelector(".stage"), `s${stage.stage_index}`);
    setText(row.querySelector(".percent"), percent(shares.busy || 0));
    const bar = row.querySelector(".bar");
    SHARES.forEach(([kind], part) => { bar.children[part].style.width = `${(shares[kind] || 0) * 100}%`; });
    const words = SHARES.filter(([kind]) => shares[kind] >= 0.005).map(([kind, name]) => `${name} ${percent(shares[kind])}`);
    setTitle(bar, words.join("\n"));
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", words.join(", "));
  });
};

const showWindow = (view) => {
  const { size, group_rows: groups } = view.window;
  const most = Math.max(...groups, 1), least = Math.min(...groups, most);
  const level = groups.length ? `requests per microbatch: ${least === most ? most : `${least} to ${most}`}` : "nothing is in flight";
  setText(byId("window-text"), `${groups.length} of at most ${size} in flight; ${level}`);
  children(byId("groups"), Math.max(size, groups.length), () => make("li")).forEach((slot, at) => {
    slot.className = at < groups.length ? "full" : "";
    setText(slot, at < groups.length ? count(groups[at]) : "–");
  });
};

const showQueue = (view) => {
  const { queue, kv } = view;
  const used = kv.num_used_blocks / kv.num_blocks;
  setText(byId("queue-text"), `${count(queue.num_running)} of at most ${count(queue.max_num_seqs)} running, ` +
    `${count(queue.num_waiting)} waiting with ${count(queue.num_waiting_tokens)} tokens`);
  byId("kv-meter").firstElementChild.style.width = `${used * 100}%`;
  byId("kv-meter").setAttribute("aria-valuenow", Math.round(used * 100));
  const limit = kv.limiting_stage === null ? "" : `; s${kv.limiting_stage} limits`;
  setText(byId("kv-text"), `${count(kv.num_used_blocks)} of ${count(kv.num_blocks)} blocks of ${kv.block_size} tokens used on ` +
    `every stage (${percent(used)})${limit}; ${count(view.requests.num_preemptions)} preemptions`);
};

const COLUMNS = ["Stage", "Layers", "Also holds", "Step", "Weights", "KV cache", "KV unused", "Process", "Link in", "Latency"];
const makeStageRow = () => {
  const row = make("tr");
  for (const name of COLUMNS) {
    const cell = make("td");
    cell.dataset.name = name;
    row.append(cell);
  }
  return row;
};

const showPartition = (view, history) => {
  const then = history.before(5);
  children(byId("partition"), view.stages.length, makeStageRow).forEach((row, at) => {
    const stage = view.stages[at];
    const link = stage.received, before = then.stages[at].received;
    const elapsed = view.now_s - then.now_s;
    const moved = elapsed > 0 ? (link.num_bytes - before.num_bytes) / elapsed : 0;
    const latency = difference(link.latency_s, before.latency_s);
    const median = percentile(total(latency) ? latency : link.latency_s, 0.5);
    const cells = [
      `s${stage.stage_index}`, `${stage.first_layer}–${stage.end_layer - 1} (${stage.end_layer - stage.first_layer})`,
      stage.also_holds.join(", ") || "–", stage.step_s ? seconds(stage.step_s) : "–", bytes(stage.weight_bytes), bytes(stage.kv_bytes),
      bytes(stage.kv_unused_bytes), stage.resident_bytes ? bytes(stage.resident_bytes) : "–",
      at ? `${bytes(moved)}/s` : "–", at && median !== null ? seconds(median) : "–",
    ];
    row.classList.toggle("slow", view.stages.length > 1 && at === view.slowest_stage);
    [...row.children].forEach((cell, column) => setText(cell, cells[column]));
  });
};

const makeEvent = () => {
  const row = make("li");
  row.append(make("span", "when"), make("span", "kind"), make("span", "text"));
  return row;
};

/** What the engine tells, and what this page noticed itself: [{time_s, kind, text, num_times}]. */
const showEvents = (events, nowS) => {
  const none = [{ time_s: null, kind: "", text: "Nothing happened: no preemption, no abort, no slow or lost stage.", num_times: 1 }];
  const shown = events.length ? events : none;
  children(byId("events"), shown.length, makeEvent).forEach((row, at) => {
    const event = shown[at];
    setText(row.querySelector(".when"), event.time_s === null ? "" : ago(nowS - event.time_s));
    setText(row.querySelector(".kind"), EVENT_NAMES[event.kind] || event.kind);
    setText(row.querySelector(".text"), event.num_times > 1 ? `${event.text} (and ${count(event.num_times - 1)} before it)` : event.text);
    row.className = event.time_s === null ? "none quiet" : "";
  });
};
