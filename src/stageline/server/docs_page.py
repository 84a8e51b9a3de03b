"""/docs: /openapi.json as a page for people. It loads nothing from anywhere else, and runs no code of others.

/ says that it is there, and what else is, to browsers and to whoever tries the address with curl.
"""

from __future__ import annotations

import base64
import hashlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.server.routing import endpoint
from stageline.server.state import ServerState

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; }
.method { display: inline-block; min-width: 3.2rem; font-weight: 600; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow: auto; background: #8881; padding: .6rem; border-radius: 6px; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .15rem .6rem .15rem 0; border-bottom: 1px solid #8883; }
.quiet { opacity: .7; }
"""

# Everything is put in as text, never as markup.
_SCRIPT = """
const make = (tag, text, parent, kind) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  if (parent) parent.append(node);
  return node;
};
const nameOf = (schema) => schema && schema.$ref ? schema.$ref.split("/").pop() : null;
const typeOf = (schema) => {
  if (!schema) return "any";
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const options = schema.anyOf || schema.oneOf;
  if (options) return options.map(typeOf).join(" | ");
  if (schema.type === "array") return "[" + typeOf(schema.items) + "]";
  return schema.type || "any";
};
const boundsOf = (schema) => ["minimum", "maximum", "exclusiveMinimum", "minItems", "maxItems", "minLength"]
  .filter((key) => schema[key] !== undefined).map((key) => key + " " + schema[key]).join(", ");
const table = (schema, parent) => {
  const rows = make("table", undefined, parent);
  const required = new Set(schema.required || []);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = make("tr", undefined, rows);
    make("code", name + (required.has(name) ? " *" : ""), make("td", undefined, row));
    make("code", typeOf(field), make("td", undefined, row));
    make("td", boundsOf(field), row, "quiet");
  }
};
const show = (api) => {
  const page = document.getElementById("page");
  page.replaceChildren();
  make("p", api.info.description, page);
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, one] of Object.entries(methods)) {
      const box = make("details", undefined, page);
      const line = make("summary", undefined, box);
      make("span", method.toUpperCase(), line, "method");
      make("code", path, line);
      make("span", "  " + one.summary, line, "quiet");
      const body = one.requestBody && one.requestBody.content["application/json"];
      if (body) {
        make("h4", "Request", box);
        if (body.example) make("pre", JSON.stringify(body.example, null, 2), box);
        table(api.components.schemas[nameOf(body.schema)] || {}, box);
      }
      make("h4", "Answers", box);
      const answers = make("table", undefined, box);
      for (const [status, answer] of Object.entries(one.responses)) {
        const row = make("tr", undefined, answers);
        make("td", status, row);
        make("td", answer.description, row);
        const kinds = Object.entries(answer.content || {});
        make("td", kinds.map(([kind, has]) => kind + ": " + typeOf(has.schema)).join("; "), row, "quiet");
      }
    }
  }
  make("h2", "Schemas", page);
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    const box = make("details", undefined, page);
    make("code", name, make("summary", undefined, box));
    if (schema.description) make("pre", schema.description, box);
    table(schema, box);
  }
};
fetch("openapi.json").then((answer) => answer.json()).then(show)
  .catch((error) => { document.getElementById("page").textContent = "openapi.json could not be read: " + error; });
"""

_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Stageline API</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><h1>Stageline API</h1><div id="page">Reading openapi.json …</div><script>{_SCRIPT}</script></body></html>
"""

_PLACES = {
    "dashboard": "the pipeline live",
    "docs": "all routes, with their fields",
    "openapi.json": "the same for programs",
    "v1/models": "the model's names",
    "metrics": "for Prometheus",
    "health": "whether it answers",
}
_INDEX_TEXT = "Stageline: OpenAI's API is under /v1.\n" + "".join(
    f"/{path:<13} {what}\n" for path, what in _PLACES.items()
)
_INDEX_PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Stageline</title></head><body>'
    "<h1>Stageline</h1><p>OpenAI's API is under <code>/v1</code>.</p><ul>"
    + "".join(f'<li><a href="{path}">/{path}</a> {what}</li>' for path, what in _PLACES.items())
    + "</ul></body></html>\n"
)


def routes(state: ServerState) -> list[Route]:
    return [
        Route("/", endpoint(state, show_index), methods=["GET"]),
        Route("/docs", endpoint(state, show_docs), methods=["GET"]),
    ]


async def show_index(_state: ServerState, http: Request) -> Response:
    if "text/html" in http.headers.get("accept", ""):
        return Response(_INDEX_PAGE, media_type="text/html", headers={"Content-Security-Policy": "default-src 'none'"})
    return Response(_INDEX_TEXT, media_type="text/plain")


async def show_docs(_state: ServerState, _http: Request) -> Response:
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src '{_hash(_SCRIPT)}'; style-src '{_hash(_STYLE)}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(_PAGE, media_type="text/html", headers={"Content-Security-Policy": policy})


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
