// What tokens wait for: a bar per request, and one for the mean of all, for the first token and for those after it.

const CAUSES = [
  ["busy", "computing", (split) => sumOf(split.stages_s)], ["sample", "sampling", (split) => split.sampling_s],
  ["starved", "waiting for a busy stage", (split) => sumOf(split.queues_s)],
  ["in_transit", "on the way between stages", (split) => sumOf(split.hops_s)],
  ["underfilled", "with the engine: not scheduled yet, or on the way back", (split) => split.engine_s],
];
const MOST_NAMED = 2;

const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

/** The stages that take most of something, such as "s1 12.0 ms, s0 3.0 ms". */
const byStage = (values) => values.map((value, at) => [value, at]).filter(([value]) => value >= 5e-6)
  .sort((one, other) => other[0] - one[0]).slice(0, MOST_NAMED).map(([value, at]) => `s${at} ${seconds(value)}`).join(", ");

const inWords = (split) => [
  `computing ${seconds(sumOf(split.stages_s))} (${byStage(split.stages_s)})`, `sampling ${seconds(split.sampling_s)}`,
  `waiting for busy stages ${seconds(sumOf(split.queues_s))}${byStage(split.queues_s) ? ` (${byStage(split.queues_s)})` : ""}`,
  `on the way ${seconds(sumOf(split.hops_s))}`, `with the engine ${seconds(split.engine_s)}`,
].join(", ");

const makeJourney = () => {
  const row = make("li");
  const bar = make("span", "bar");
  for (const [kind] of CAUSES) bar.append(make("span", kind));
  row.append(make("span", "what"), bar, make("span", "took"));
  return row;
};

const showJourneys = (view) => {
  const rows = [["TTFT, mean", view.ttft, true], ["ITL, mean", view.itl, true]];
  for (const journey of [...view.journeys].reverse()) rows.push([`TTFT ${journey.request_id}`, journey.ttft], [`ITL ${journey.request_id}`, journey.itl]);
  const shown = rows.filter(([, split]) => split);
  setText(byId("journeys-text"), shown.length ? `TTFT: ${view.ttft ? inWords(view.ttft) : "none lately"}; ITL: ${view.itl ? inWords(view.itl) : "none lately"}`
    : "No token came in the last seconds");
  children(byId("journeys"), shown.length, makeJourney).forEach((row, at) => {
    const [name, split, isMean] = shown[at];
    row.classList.toggle("slow", Boolean(isMean));
    setText(row.querySelector(".what"), name);
    setText(row.querySelector(".took"), seconds(split.total_s));
    const bar = row.querySelector(".bar");
    CAUSES.forEach(([, , part], place) => { bar.children[place].style.width = `${(Math.max(0, part(split)) / split.total_s) * 100}%`; });
    const words = inWords(split);
    setTitle(bar, words);
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${name} ${seconds(split.total_s)}: ${words}`);
  });
};
