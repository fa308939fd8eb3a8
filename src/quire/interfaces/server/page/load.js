// Throughput, latency and the number of requests: four figures, each with a chart.

import { Chart } from "./charts.js";
import { count, figure, milliseconds, setText } from "./words.js";

export class Load {
  constructor() {
    const half = { colour: "accent", fill: true };
    const slow = { colour: "soft", dash: [3, 3] };
    this.tokens = new Chart("tokens-chart", [half]);
    this.first = new Chart("first-chart", [half, slow]);
    this.between = new Chart("between-chart", [half, slow]);
    this.requests = new Chart("requests-chart", [half, { colour: "warn", dash: [3, 3] }]);
  }

  show(state) {
    const now = performance.now() / 1000;
    const { throughput, latency } = state;
    const tokens = throughput.generated_tokens_per_second;
    this.tokens.add(now, [tokens]);
    setText("tokens", figure(tokens));
    setText("tokens-more", `${count(throughput.generated_tokens_total)} since the start`);
    this.#latency("first", this.first, latency.time_to_first_token, now);
    this.#latency("between", this.between, latency.between_tokens, now);
    this.requests.add(now, [state.num_running, state.num_waiting]);
    setText("running", count(state.num_running));
    setText("waiting", count(state.num_waiting));
    const gave = state.num_preempted ? `${count(state.num_preempted)} of those gave way · ` : "";
    setText("requests-more", `${gave}at most ${count(state.max_num_seqs)} at once`);
    this.draw();
  }

  draw() {
    for (const chart of [this.tokens, this.first, this.between, this.requests]) chart.draw();
  }

  #latency(id, chart, measured, now) {
    chart.add(now, measured ? [measured.p50_seconds, measured.p95_seconds] : [null, null]);
    setText(id, measured ? milliseconds(measured.p50_seconds) : "–");
    setText(`${id}-more`, measured ? `95 of 100 within ${milliseconds(measured.p95_seconds)} ms` : "nothing measured lately");
  }
}
