// Asks the server again and again, a little later each time it fails, and not at all while nobody looks.

const KEY_NAME = "stageline-key";
const EVERY_MS = 500, LONGEST_MS = 10000;

class Refused extends Error {}
class NotNow extends Error {
  constructor(message, state) { super(message); this.state = state; }
}

const history_ = new History();
const noticed = [];
let waitMs = EVERY_MS, timer = 0, isPaused = false, isAsking = false, lastS = null, view = null;

const describe = (span, all) => {
  if (!span) return "Point at a microbatch, or focus the timeline and use the arrow keys.";
  const took = all.map((one) => `${one[KIND].replace("_", " ")} ${seconds(one[END] - one[START])}`).join(", ");
  const rows = span[ROWS] === 1 ? "1 request" : `${span[ROWS]} requests`;
  const what = carriesPrompt(span) ? `${count(span[TOKENS])} tokens, some of prompts` : "one token each";
  return `s${span[STAGE]} m${span[MICROBATCH]}: ${rows}, ${what}; ${took}`;
};
const timeline = new Timeline(byId("gantt"), (span, all) => setText(byId("picked"), describe(span, all)));

const setStatus = (state, text) => {
  byId("status").dataset.state = state;
  setText(byId("status"), text);
};

const get = async (path) => {
  const key = sessionStorage.getItem(KEY_NAME);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let answer;
  try {
    answer = await fetch(path, { headers, cache: "no-store" });
  } catch {
    throw new NotNow("the server does not answer", "lost");
  }
  if (answer.ok) return answer.json();
  if (answer.status === 401) throw new Refused();
  const body = await answer.json().catch(() => null);
  const message = (body && body.error && body.error.message) || `the server answered ${answer.status}`;
  throw new NotNow(message, answer.status === 503 ? "waiting" : "lost");
};

const show = (spans) => {
  byId("key-form").hidden = true;
  byId("content").hidden = false;
  setText(byId("model"), view.model);
  document.title = `${view.model} · Stageline`;
  history_.add(view);
  timeline.add(spans);
  showNumbers(view, history_);
  showAdvice(view);
  showShares(view);
  showWindow(view);
  showQueue(view);
  showPartition(view, history_);
  showJourneys(view);
  showEvents([...noticed, ...view.events], view.now_s);
};

const askForKey = () => {
  const had = sessionStorage.getItem(KEY_NAME) !== null;
  sessionStorage.removeItem(KEY_NAME);
  byId("content").hidden = true;
  byId("key-form").hidden = false;
  setText(byId("key-error"), had ? "The server refused this key." : "");
  setStatus("waiting", "a key is needed");
  byId("key").focus();
};

const notice = (problem) => {
  setStatus(problem.state, problem.message);
  if (view === null || problem.state !== "lost") return;
  if (noticed.length && noticed[0].text === problem.message) return;
  noticed.unshift({ time_s: view.now_s, kind: "lost", text: problem.message, num_times: 1 });
  showEvents([...noticed, ...view.events], view.now_s);
};

// Of several replicas, one: /dashboard?engine=1 shows the second.
const ENGINE = new URLSearchParams(location.search).get("engine");
const WHICH = ENGINE === null ? "" : `engine=${encodeURIComponent(ENGINE)}`;

const ask = async () => {
  clearTimeout(timer);
  if (isAsking || isPaused || document.hidden) return;
  isAsking = true;
  try {
    const missedS = lastS === null ? Infinity : performance.now() / 1000 - lastS + 0.4;
    const wanted = Math.min(60, timeline.shownS + 0.4, Math.max(0.1, missedS));
    const askedS = performance.now() / 1000;
    const [newView, spans] = await Promise.all([
      get(`debug/pipeline${WHICH && `?${WHICH}`}`),
      get(`debug/timeline?seconds=${wanted.toFixed(2)}${WHICH && `&${WHICH}`}`),
    ]);
    lastS = askedS;
    view = newView;
    show(spans);
    setStatus("live", `live, up for ${seconds(view.now_s - view.started_s)}`);
    waitMs = EVERY_MS;
  } catch (problem) {
    if (problem instanceof Refused) return askForKey();
    if (!(problem instanceof NotNow)) throw problem;
    notice(problem);
    lastS = null;
    waitMs = Math.min(LONGEST_MS, waitMs * 2);
  } finally {
    isAsking = false;
  }
  timer = setTimeout(ask, waitMs);
  return undefined;
};

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_NAME, byId("key").value.trim());
  byId("key").value = "";
  setStatus("waiting", "connecting");
  ask();
});
byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", isPaused);
  setText(byId("pause"), isPaused ? "Resume" : "Pause");
  if (isPaused) setStatus("waiting", "paused");
  else { lastS = null; ask(); }
});
byId("span").addEventListener("change", () => {
  timeline.shownS = Number(byId("span").value);
  timeline.forget();
  lastS = null;
  ask();
});
document.addEventListener("visibilitychange", () => { waitMs = EVERY_MS; lastS = null; ask(); });

showLegend(byId("legend"), BOXES);
showLegend(byId("share-legend"), SHARES);
showLegend(byId("journey-legend"), CAUSES);
if (document.documentElement.dataset.needsKey === "yes" && sessionStorage.getItem(KEY_NAME) === null) askForKey();
else ask();
