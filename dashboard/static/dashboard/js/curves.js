// Training curves as values: one per generation, brought up to date from the REST API, and laid out for a chart.
//
// Steps that were made again after a roll-back are kept in both generations. Nothing here draws.

const FIRST_POINTS = 4000;

export class Curves {
  /** @param {string} url of the job's metrics */
  constructor(url) {
    this.url = url;
    this.generations = new Map(); // generation -> { parentStep, every, points }
  }

  get newest() {
    return Math.max(0, ...this.generations.keys());
  }

  get isEmpty() {
    return this.newest === 0;
  }

  /** Fetch what is not here yet, up to the job's newest generation. Returns whether there was any. */
  async update(newestGeneration) {
    if (this.isEmpty) {
      return this.#take(await this.#fetch({ max_points: FIRST_POINTS }));
    }
    let grown = false;
    for (let generation = this.newest; generation <= newestGeneration; generation += 1) {
      let more = true;
      while (more) {
        const points = this.generations.get(generation)?.points;
        const after = points?.length ? { after_step: points[points.length - 1].step } : {};
        const answer = await this.#fetch({ generation, ...after });
        grown = this.#take(answer) || grown;
        more = answer.more && answer.series.length > 0;
      }
    }
    return grown;
  }

  async #fetch(query) {
    const answer = await fetch(`${this.url}?${new URLSearchParams(query)}`, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(`The curve could not be loaded: the server answered ${answer.status}.`);
    return answer.json();
  }

  #take(answer) {
    let grown = false;
    for (const series of answer.series) {
      const kept = this.generations.get(series.generation);
      if (kept) {
        const last = kept.points.length ? kept.points[kept.points.length - 1].step : -1;
        kept.points.push(...series.points.filter((point) => point.step > last));
      } else {
        this.generations.set(series.generation, {
          parentStep: series.parent_step ?? 0,
          every: answer.every,
          points: [...series.points],
        });
      }
      grown ||= series.points.length > 0;
    }
    return grown;
  }

  /** Generations in order, each with its points; canonical: each step once, from the newest generation that made it. */
  curves(canonical) {
    const made = [];
    let cut = Infinity;
    for (const number of [...this.generations.keys()].sort((a, b) => b - a)) {
      const { parentStep, every, points } = this.generations.get(number);
      const limit = canonical ? cut : Infinity;
      made.unshift({ number, parentStep, every, points: points.filter((point) => point.step <= limit) });
      cut = Math.min(cut, parentStep);
    }
    return made;
  }

  /** Stretches of steps that a generation made again: [{generation, from, to}], `to` being what had been reached. */
  replays() {
    const made = [];
    let reached = 0;
    for (const number of [...this.generations.keys()].sort((a, b) => a - b)) {
      const { parentStep, points } = this.generations.get(number);
      if (reached > parentStep) made.push({ generation: number, from: parentStep, to: reached });
      reached = Math.max(reached, ...points.slice(-1).map((point) => point.step));
    }
    return made;
  }
}

/**
 * Lay curves over one axis of steps: [steps, values of curve 1, ...]. `undefined` where a curve has no step there (the
 * line goes on), `null` where a step is missing or has no value (the line is broken: a gap is drawn as a gap).
 */
export function aligned(curves, valueOf) {
  const values = curves.map(({ points, every }) => {
    const at = new Map();
    let before = null;
    for (const point of points) {
      if (before !== null && point.step - before > every) at.set(before + 1, null);
      at.set(point.step, valueOf(point) ?? null);
      before = point.step;
    }
    return at;
  });
  const steps = [...new Set(values.flatMap((at) => [...at.keys()]))].sort((a, b) => a - b);
  return [steps, ...values.map((at) => steps.map((step) => at.get(step)))];
}
