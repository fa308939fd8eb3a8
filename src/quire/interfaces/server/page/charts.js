// Small line charts of the last two minutes, drawn on canvases; their newest values stand beside them as text.

import { scheme, surface } from "./colours.js";

const SECONDS = 120;

export class Chart {
  // lines: [{ colour: name of a colour, fill: whether the area below is tinted, dash: for a second line }]
  constructor(id, lines) {
    this.canvas = document.getElementById(id);
    this.lines = lines;
    this.points = [];
  }

  // values: one a line; null where nothing was measured
  add(time, values) {
    this.points.push({ time, values });
    while (this.points.length > 2 && this.points[1].time < time - SECONDS) this.points.shift();
  }

  draw() {
    const found = surface(this.canvas);
    if (!found || !this.points.length) return;
    const { pen, width, height } = found;
    const colours = scheme();
    const now = this.points.at(-1).time;
    const most = Math.max(...this.points.flatMap((point) => point.values.map((value) => value ?? 0)), 1e-9);
    const x = (time) => width - ((now - time) / SECONDS) * width;
    const y = (value) => height - 1.5 - (value / (most * 1.12)) * (height - 5);
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(0, height - 0.5);
    pen.lineTo(width, height - 0.5);
    pen.stroke();
    this.lines.forEach((line, index) => this.#line(pen, line, index, { x, y, height, colours }));
  }

  #line(pen, line, index, { x, y, height, colours }) {
    const points = this.points.filter((point) => point.values[index] !== null);
    if (!points.length) return;
    pen.beginPath();
    points.forEach((point, number) => {
      const at = [x(point.time), y(point.values[index])];
      if (number) pen.lineTo(...at);
      else pen.moveTo(...at);
    });
    pen.strokeStyle = colours[line.colour];
    pen.lineWidth = line.dash ? 1.25 : 1.75;
    pen.setLineDash(line.dash ?? []);
    pen.lineJoin = "round";
    pen.stroke();
    pen.setLineDash([]);
    if (!line.fill) return;
    pen.lineTo(x(points.at(-1).time), height);
    pen.lineTo(x(points[0].time), height);
    pen.closePath();
    pen.globalAlpha = 0.14;
    pen.fillStyle = colours[line.colour];
    pen.fill();
    pen.globalAlpha = 1;
  }
}
