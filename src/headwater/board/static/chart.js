// A line chart on a canvas. Each point of a curve is a range from the least to the greatest value of some steps,
// so a spike of a single step stays visible.

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const HUES = [212, 28, 145, 330, 260, 55, 185, 0];
const MARGIN = { left: 62, right: 10, top: 8, bottom: 24 };

/** The color and the dashes of a run: dashes tell runs apart for readers who see few colors. */
export function lineStyle(index, dark) {
  const hue = (HUES[index % HUES.length] + 17 * Math.floor(index / HUES.length)) % 360;
  return { color: `hsl(${hue} 75% ${dark ? 68 : 36}%)`, dash: DASHES[Math.floor(index / HUES.length) % DASHES.length] };
}

/** Round values between `low` and `high` for the axis, about `count` of them. */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  if (size > 0 && size < 1e-3) return (+value.toPrecision(3)).toExponential();
  return String(+value.toPrecision(4));
}

export class Chart {
  /** `onRead(text)` gets the values at the cursor, for the line above the charts. */
  constructor(title, onRead) {
    this.title = title;
    this.onRead = onRead;
    this.curves = [];
    this.cursor = null;
    this.logarithmic = false;
    this.element = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "chart";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.element.append(caption, this.canvas);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => this.moveTo(null));
    this.canvas.addEventListener("blur", () => this.moveTo(null));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** Curves: {name, color, dash, steps, low, high, marks: [[step, value]]}; values may be null. */
  show(curves) {
    this.curves = curves;
    const last = curves.map((curve) => [curve.name, curve.high.findLast((value) => value !== null)]);
    const told = last.slice(0, 5).map(([name, value]) => `${name} ${value === undefined ? "none" : shortNumber(value)}`);
    const more = last.length > 5 ? `, and ${last.length - 5} more runs` : "";
    this.canvas.setAttribute("aria-label", `${this.title}. Last values: ${told.join(", ") || "none"}${more}`);
    this.draw();
  }

  key(event) {
    const places = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };
    const steps = this.longest();
    if (!steps.length) return;
    const at = this.cursor === null ? steps.length : steps.findIndex((step) => step >= this.cursor);
    let place = at;
    if (event.key in places) place = at + places[event.key];
    else if (event.key === "Home") place = 0;
    else if (event.key === "End") place = steps.length - 1;
    else return;
    event.preventDefault();
    this.moveTo(steps[Math.max(0, Math.min(steps.length - 1, place))]);
  }

  longest() {
    return this.curves.reduce((found, curve) => (curve.steps.length > found.length ? curve.steps : found), []);
  }

  point(x) {
    const { lastStep } = this.bounds();
    const width = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
    const step = ((x - MARGIN.left) / width) * lastStep;
    const steps = this.longest();
    if (steps.length) this.moveTo(steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best)));
  }

  moveTo(step) {
    this.cursor = step;
    this.draw();
    this.onRead(step === null ? "" : `${this.title}, step ${step}: ${this.valuesAt(step).join(", ")}`);
  }

  valuesAt(step) {
    const found = [];
    for (const { name, steps, low, high } of this.curves) {
      const place = steps.findIndex((each) => each >= step);
      if (place < 0 || low[place] === null) continue;
      const same = low[place] === high[place];
      found.push(`${name} ${shortNumber(low[place])}${same ? "" : ` to ${shortNumber(high[place])}`}`);
    }
    return found.length > 8 ? [...found.slice(0, 8), `and ${found.length - 8} more runs`] : found;
  }

  bounds() {
    let [low, high, lastStep] = [Infinity, -Infinity, 1];
    for (const curve of this.curves) {
      for (const value of curve.low) if (value !== null && (!this.logarithmic || value > 0)) low = Math.min(low, value);
      for (const value of curve.high) if (value !== null) high = Math.max(high, value);
      for (const [, value] of curve.marks) [low, high] = [Math.min(low, value), Math.max(high, value)];
      if (curve.steps.length) lastStep = Math.max(lastStep, curve.steps[curve.steps.length - 1]);
    }
    if (low > high) [low, high] = [0, 1];
    if (low === high) [low, high] = [low - Math.abs(low) * 0.05 - 1e-12, high + Math.abs(high) * 0.05 + 1e-12];
    return { low, high, lastStep };
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width) return;
    [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const { low, high, lastStep } = this.bounds();
    const scaled = this.logarithmic && low > 0 ? Math.log10 : (value) => value;
    const [bottom, top] = [scaled(low), scaled(high)];
    const x = (step) => MARGIN.left + (step / lastStep) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => height - MARGIN.bottom
      - ((scaled(value) - bottom) / (top - bottom)) * (height - MARGIN.top - MARGIN.bottom);
    this.drawAxes(context, { low, high, lastStep, x, y, width, height });
    for (const curve of this.curves) this.drawCurve(context, curve, x, y);
    if (this.cursor !== null) {
      context.setLineDash([4, 3]);
      context.strokeStyle = getComputedStyle(this.canvas).color;
      context.strokeRect(x(this.cursor), MARGIN.top, 0, height - MARGIN.top - MARGIN.bottom);
    }
  }

  drawAxes(context, { low, high, lastStep, x, y, width, height }) {
    const style = getComputedStyle(document.documentElement);
    context.font = "12px system-ui, sans-serif";
    context.strokeStyle = style.getPropertyValue("--line");
    context.fillStyle = style.getPropertyValue("--quiet");
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ticks(low, high, 5)) {
      context.strokeRect(MARGIN.left, Math.round(y(value)) + 0.5, width - MARGIN.left - MARGIN.right, 0);
      context.fillText(shortNumber(value), MARGIN.left - 6, y(value));
    }
    context.textBaseline = "top";
    context.textAlign = "center";
    context.fillText("step", MARGIN.left - 24, height - MARGIN.bottom + 6);
    const labels = ticks(0, lastStep, Math.max(2, width / 70)).filter((step) => step > 0 && Number.isInteger(step));
    for (const step of labels) {
      const half = context.measureText(shortNumber(step)).width / 2;
      context.fillText(shortNumber(step), Math.min(x(step), width - half - 1), height - MARGIN.bottom + 6);
    }
  }

  /** Draw the range of each point as a band, and a line through the middles of the ranges. */
  drawCurve(context, curve, x, y) {
    context.strokeStyle = context.fillStyle = curve.color;
    context.lineJoin = "round";
    for (const places of this.segments(curve)) {
      const points = places.map((place) => [x(curve.steps[place]), y(curve.high[place]), y(curve.low[place])]);
      // The outline keeps a spike visible whose band is narrower than a pixel.
      context.lineWidth = 0.8;
      context.globalAlpha = 0.4;
      context.beginPath();
      points.forEach(([across, top]) => context.lineTo(across, top));
      points.toReversed().forEach(([across, , bottom]) => context.lineTo(across, bottom));
      context.closePath();
      context.fill();
      context.stroke();
      context.globalAlpha = 1;
      context.lineWidth = 1.5;
      context.setLineDash(curve.dash);
      context.beginPath();
      // The first point twice: a segment of one point is drawn as a dot.
      [points[0], ...points].forEach(([across, top, bottom]) => context.lineTo(across + 0.01, (top + bottom) / 2));
      context.stroke();
      context.setLineDash([]);
    }
    for (const [step, value] of curve.marks) {
      context.beginPath();
      context.arc(x(step), y(value), 3.2, 0, 7);
      context.fill();
    }
  }

  /** The places of consecutive points that have values and can be drawn. */
  segments({ steps, low }) {
    const found = [[]];
    steps.forEach((_, place) => {
      if (low[place] === null || (this.logarithmic && low[place] <= 0)) found.push([]);
      else found[found.length - 1].push(place);
    });
    return found.filter((places) => places.length);
  }
}
