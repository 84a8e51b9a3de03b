// The timeline: one lane per stage, now at the right edge, drawn whenever there is something new.

const STAGE = 0, MICROBATCH = 1, KIND = 2, START = 3, END = 4, TOKENS = 5, ROWS = 6;
const carriesPrompt = (span) => span[TOKENS] > span[ROWS];

class Timeline {
  constructor(canvas, told) {
    this.canvas = canvas;
    this.told = told;
    this.spans = new Map();
    this.numStages = 1;
    this.endS = 0;
    this.shownS = 1;
    this.picked = null;
    this.forwards = [];
    canvas.addEventListener("pointermove", (event) => this.pick(this.spanAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerdown", (event) => this.pick(this.spanAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.pick(null));
    canvas.addEventListener("blur", () => this.pick(null));
    canvas.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  forget() { this.spans.clear(); }

  add(timeline) {
    this.numStages = timeline.num_stages;
    this.endS = timeline.end_s;
    for (const span of timeline.spans) this.spans.set(`${span[STAGE]} ${span[KIND]} ${span[START]}`, span);
    const oldest = this.endS - this.shownS - 0.5;
    for (const [key, span] of this.spans) if (span[END] < oldest) this.spans.delete(key);
    this.canvas.style.height = `${this.laneHeight * this.numStages + 22}px`;
    this.draw();
  }

  get laneHeight() { return Math.max(9, Math.min(44, Math.floor(420 / this.numStages))); }
  get left() { return this.numStages > 9 ? 34 : 30; }
  get width() { return this.canvas.clientWidth - this.left; }
  x(timeS) { return this.left + ((timeS - (this.endS - this.shownS)) / this.shownS) * this.width; }

  draw() {
    const { canvas, laneHeight, left } = this;
    const scale = devicePixelRatio || 1;
    const wide = canvas.clientWidth, high = laneHeight * this.numStages + 22;
    if (!wide) return;
    if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(high * scale)) {
      canvas.width = Math.round(wide * scale);
      canvas.height = Math.round(high * scale);
    }
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const colors = Object.fromEntries(
      ["decode", "prefill", "sample", "lane", "starved", "in_transit", "blocked", "quiet", "on-box", "pick", "card", "line"]
        .map((name) => [name, color(name)]));
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, wide, high);
    this.drawLanes(pen, colors, style.fontFamily);
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, wide - left, high);
    pen.clip();
    this.drawSpans(pen, colors, style.fontFamily);
    pen.restore();
  }

  drawLanes(pen, colors, font) {
    const { laneHeight, left } = this;
    const every = laneHeight < 12 ? 4 : 1;
    pen.font = `12px ${font}`;
    pen.textBaseline = "middle";
    for (let stage = 0; stage < this.numStages; stage += 1) {
      const top = stage * laneHeight;
      pen.fillStyle = colors.lane;
      pen.fillRect(left, top + 1, this.width, laneHeight - 2);
      pen.fillStyle = colors.quiet;
      pen.textAlign = "left";
      if (stage % every === 0) pen.fillText(`s${stage}`, 0, top + laneHeight / 2);
    }
    const bottom = this.numStages * laneHeight;
    const steps = this.width < 420 ? 2 : 5;
    for (let step = 0; step <= steps; step += 1) {
      const backS = this.shownS * (1 - step / steps);
      pen.textAlign = step === steps ? "right" : step ? "center" : "left";
      pen.fillText(step === steps ? "now" : `−${backS < 1 ? `${Math.round(backS * 1000)} ms` : `${backS.toFixed(1)} s`}`, left + (this.width * step) / steps, bottom + 12);
    }
  }

  drawSpans(pen, colors, font) {
    const from = this.endS - this.shownS;
    const shown = [...this.spans.values()].filter((span) => span[STAGE] >= 0 && span[END] > from);
    this.forwards = shown.filter((span) => span[KIND] === "forward").sort((a, b) => a[START] - b[START]);
    const ended = new Map(this.forwards.map((span) => [`${span[STAGE]} ${span[MICROBATCH]}`, span[END]]));
    for (const span of shown) if (span[KIND] === "receive_wait") this.drawWait(pen, colors, span, ended);
    for (const span of shown) if (span[KIND] === "send") this.block(pen, colors.blocked, span, 0.25);
    for (const span of shown) if (span[KIND] === "forward") this.drawBox(pen, colors, span, font);
    for (const span of shown) if (span[KIND] === "sample") this.block(pen, colors.sample, span, 0);
    if (this.picked) this.drawPicked(pen, colors);
  }

  drawWait(pen, colors, span, ended) {
    const computed = ended.get(`${span[STAGE] - 1} ${span[MICROBATCH]}`);
    if (span[STAGE] === 0) return;
    const until = computed === undefined ? span[END] : Math.max(span[START], Math.min(span[END], computed));
    const part = (start, end) => [span[STAGE], span[MICROBATCH], span[KIND], start, end];
    pen.globalAlpha = 0.45;
    this.block(pen, colors.starved, part(span[START], until), 0.25);
    this.block(pen, colors.in_transit, part(until, span[END]), 0.25);
    pen.globalAlpha = 1;
  }

  block(pen, color, span, inset) {
    const start = this.x(span[START]), end = this.x(span[END]), height = this.laneHeight - 4;
    if (end - start < 0.3) return;
    pen.fillStyle = color;
    pen.fillRect(start, span[STAGE] * this.laneHeight + 2 + height * inset, Math.max(0.6, end - start), height * (1 - 2 * inset));
  }

  drawBox(pen, colors, span, font) {
    const start = this.x(span[START]), width = this.x(span[END]) - start, height = this.laneHeight - 4;
    const top = span[STAGE] * this.laneHeight + 2;
    pen.fillStyle = carriesPrompt(span) ? colors.prefill : colors.decode;
    pen.beginPath();
    pen.roundRect(start, top, Math.max(0.8, width - (width > 4 ? 1 : 0)), height, width > 8 ? 3 : 0);
    pen.fill();
    if (width < 30 || height < 13) return;
    pen.fillStyle = colors["on-box"];
    pen.font = `12px ${font}`;
    pen.textAlign = "center";
    pen.fillText(`m${span[MICROBATCH]}`, start + width / 2, top + height / 2 + 0.5, width - 4);
  }

  /** The picked microbatch on all stages, and its way between them. */
  drawPicked(pen, colors) {
    const same = this.forwards.filter((span) => span[MICROBATCH] === this.picked[MICROBATCH])
      .sort((a, b) => a[STAGE] - b[STAGE]);
    pen.strokeStyle = colors.pick;
    pen.lineWidth = 2;
    pen.beginPath();
    same.forEach((span, at) => {
      const top = span[STAGE] * this.laneHeight + 2;
      pen.rect(this.x(span[START]), top, Math.max(2, this.x(span[END]) - this.x(span[START])), this.laneHeight - 4);
      if (at && same[at - 1][STAGE] === span[STAGE] - 1) {
        pen.moveTo(this.x(same[at - 1][END]), top - 4);
        pen.lineTo(this.x(span[START]), top);
      }
    });
    pen.stroke();
  }

  spanAt(x, y) {
    const stage = Math.floor(y / this.laneHeight);
    const timeS = this.endS - this.shownS + ((x - this.left) / this.width) * this.shownS;
    const near = (3 / this.width) * this.shownS;
    return this.forwards.find((span) => span[STAGE] === stage && span[START] - near <= timeS && timeS <= span[END] + near) || null;
  }

  pick(span) {
    if (span === this.picked) return;
    this.picked = span;
    this.told(span, span && this.ofMicrobatch(span));
    this.draw();
  }

  /** The other things that are known of a microbatch on its stage. */
  ofMicrobatch(span) {
    return [...this.spans.values()].filter((one) => one[STAGE] === span[STAGE] && one[MICROBATCH] === span[MICROBATCH]);
  }

  step(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Escape") return this.pick(null);
    if (!moves[event.key] || !this.forwards.length) return undefined;
    event.preventDefault();
    const [along, across] = moves[event.key];
    const last = this.forwards.at(-1);
    const now = this.picked || last;
    if (!this.picked) return this.pick(last);
    if (across) {
      const next = this.forwards.find((span) => span[MICROBATCH] === now[MICROBATCH] && span[STAGE] === now[STAGE] + across);
      return next && this.pick(next);
    }
    const lane = this.forwards.filter((span) => span[STAGE] === now[STAGE]);
    const at = lane.findIndex((span) => span[MICROBATCH] === now[MICROBATCH]);
    const next = lane[at < 0 ? lane.length - 1 : at + along];
    return next && this.pick(next);
  }
}
