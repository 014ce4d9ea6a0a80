// The request of the form as code that can be pasted.

const KEY = "FOREDRAFT_API_KEY";

/** The text for a shell or for Python with the official client; asks the environment for a key where one is needed. */
export function snippet(language, origin, path, body, hasKey) {
  return language === "python" ? python(origin, path, body, hasKey) : curl(origin, path, body, hasKey);
}

function curl(origin, path, body, hasKey) {
  const quoted = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $${KEY}"` : "";
  return `curl -N ${origin}${path} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}

function python(origin, path, body, hasKey) {
  const { messages, prompt, temperature, top_p, max_tokens, seed, ...own } = body;
  delete own.stream;
  const isChat = path.includes("chat");
  const first = isChat ? ["messages", messages] : ["prompt", prompt];
  const given = [first, ...Object.entries({ temperature, top_p, max_tokens, seed })];
  const lines = given.map(([name, value]) => `    ${name}=${literal(value)},`);
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${hasKey ? `os.environ["${KEY}"]` : '"none"'})
stream = client.${isChat ? "chat.completions" : "completions"}.create(
    model=client.models.list().data[0].id,
${lines.join("\n")}
    stream=True,
    extra_body=${literal(own)},
)
for chunk in stream:
    for choice in chunk.choices:
        print(${isChat ? 'choice.delta.content or ""' : "choice.text"}, end="", flush=True)
`;
}

/** A JSON value as Python writes it. */
function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null || value === undefined) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** Copies a text; also where a page without TLS has no clipboard of its own. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "visually-hidden";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Says on a button for a moment that something was copied. */
export function copyFrom(button, text) {
  copy(text);
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1500);
}
