// A client that shares nothing with Foredraft but the .proto files. Prints one JSON object.
// node node_client.cjs HOST:PORT PROTOS_DIRECTORY PROMPT

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protos, prompt] = process.argv.slice(2);
const definition = loader.loadSync("foredraft/api/inference/v1/inference.proto", {
  includeDirs: [protos],
  longs: String,
  enums: String,
  oneofs: true,
  defaults: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).foredraft.api.inference.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure(), {
  "grpc.default_compression_algorithm": grpc.compressionAlgorithms.gzip,
});

const unary = (method, request) =>
  new Promise((resolve, reject) =>
    client[method](request, (error, answer) => (error ? reject(error) : resolve(answer))),
  );

// Reads a stream to its end; `onResponse` may cancel the call.
const generate = (request, options = {}, onResponse = () => {}) =>
  new Promise((resolve) => {
    const call = client.Generate({ text: prompt, ...request }, options);
    const responses = [];
    call.on("data", (response) => {
      responses.push(response);
      onResponse(call);
    });
    call.on("error", (error) => resolve({ responses, error }));
    call.on("end", () => resolve({ responses }));
  });

async function main() {
  const sampling = { temperature: 0.8, seed: "18446744073709551615", maxNewTokens: 40 };
  const long = { sampling: { maxNewTokens: 480, ignoreEos: true, n: 4 } };
  const { models } = await unary("ListModels", {});
  const whole = await generate({ sampling, returnProvenance: true });
  const late = await generate(long, { deadline: Date.now() + 50 });
  const cancelled = await generate(long, {}, (call) => call.cancel());
  const refused = await generate({ sampling: { temperature: -1 } });
  const unknown = await generate({ model: "other" });
  const completion = whole.responses.at(-1).completion;
  const tokens = whole.responses.flatMap((response) => response.tokens);
  console.log(
    JSON.stringify({
      model: models[0].id,
      text: whole.responses.map((response) => response.text).join(""),
      ids: tokens.map((token) => token.id),
      provenances: tokens.map((token) => token.provenance),
      completion,
      late: grpc.status[late.error.code],
      cancelled: grpc.status[cancelled.error.code],
      refused: grpc.status[refused.error.code],
      details: refused.error.metadata.get("grpc-status-details-bin")[0].toString("base64"),
      unknown: grpc.status[unknown.error.code],
    }),
  );
  client.close();
}

main();
