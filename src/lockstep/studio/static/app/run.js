// The page of one run: overview, charts, log, evaluation, configuration and files as tabs.

import { html, useEffect, useState } from "./html.js";
import { filePath, post, runPath, useAnswer } from "./api.js";
import { studio } from "./catalogue.js";
import { Curves, useRuns } from "./curves.js";
import { Evaluation } from "./evaluation.js";
import { bytes, clock, duration, heading, many, number, percent } from "./format.js";
import { findRun, isGoing, label, monitored, runs } from "./live.js";
import { Coloured, Log } from "./log.js";
import { newestStep, ResumeDialog } from "./resume.js";
import { Facts, Summary } from "./overview.js";
import { address, go, route } from "./route.js";
import { actionsFor } from "./runs.js";
import { Badge, Boundary, Button, Code, Decisions, Menu, openDialog, Problem, Search, showError, showMessage, Table, Tabs, Tag } from "./ui.js";

const ENDS = {
  failed: "The run failed.",
  lost: "The run's process ended without a final status: it was killed, or the machine went down. Checkpoints are kept.",
  stopped: "The run was stopped.",
};

/** The lines of a failure with its exception, cause and fix. */
const summaryOf = (error) => {
  const lines = (error ?? "").split("\n").map((line) => line.trim()).filter(Boolean);
  const raised = lines.filter((line) => /^(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*:/.test(line)).at(-1);
  return [raised ?? lines[0], ...lines.filter((line) => /^(cause|why|fix):/i.test(line))].filter(Boolean);
};

/** The end of a run: cause, step, and last output. */
function Ended({ run, detail }) {
  const cause = summaryOf(run.error);
  return html`<section class="stack" aria-label="How it ended">
    <p class="note ${run.status === "stopped" ? "warn" : "bad"}">
      ${cause.map((line, at) => html`<strong key=${line} class=${at ? "muted" : ""} style=${{ display: "block" }}>${line}</strong>`)}
      ${ENDS[run.status]} ${run.step > 0 && html`Step ${number(run.step)}${run.total_steps ? ` of ${number(run.total_steps)}` : ""}.`}
      ${detail?.checkpoints.length > 0 && html` Newest checkpoint: step ${number(newestStep(detail))}.`}
    </p>
    ${run.resume_error && html`<p class="note bad" role="alert">The last resume did not start an attempt. Its output:</p>
      <pre class="wrap log" tabindex="0" aria-label="Why it was not resumed"><${Coloured} text=${run.resume_error} /></pre>`}
    ${run.error && html`<pre class="wrap log" tabindex="0" aria-label="Failure"><${Coloured} text=${run.error} /></pre>`}
    ${detail?.start_output && !run.resume_error && detail.start_output !== run.error && html`<pre class="wrap log" tabindex="0" aria-label="Output of the command"><${Coloured} text=${detail.start_output} /></pre>`}
  </section>`;
}

function Settings({ run, detail }) {
  if (!detail) return null;
  return html`
    <div class="card stack"><${Code} title="Command" of=" of the run" text=${detail.command} wrap /></div>
    ${detail.plan && html`<${Decisions} decisions=${detail.plan.decisions} notes=${detail.plan.notes} />`}
    <div class="card stack"><${Code} title="config.yaml" of=" of the run" text=${detail.config_yaml} /></div>
    <div class="card stack"><h2>Versions</h2><dl class="facts-list">${Object.entries(detail.versions).map(([name, version]) => html`<dt key=${name}>${name}</dt><dd>${version}</dd>`)}</dl></div>
  `;
}

function Files({ run }) {
  const { found, error } = useAnswer(runPath(run.id, "/files"), [run.status]);
  const [text, setText] = useState("");
  if (!found) return error ? html`<${Problem} error=${error} />` : html`<p class="empty" role="status">Loading files…</p>`;
  const shown = found.files.filter(({ path }) => path.toLowerCase().includes(text.toLowerCase()));
  return html`<div class="card stack scroll-x">
    <div class="row">
      <${Search} label="Search files" text=${text} onSearch=${setText} />
      <span class="muted number">${many(shown.length, "file")}, ${bytes(shown.reduce((sum, file) => sum + file.bytes, 0))}</span>
    </div>
    <${Table} label="Files" heads=${["File", ["Size"], ["Changed"]]} rows=${shown.slice(0, 500).map((file) => [html`<a class="mono" href=${filePath(run.id, file.path)} target="_blank" rel="noopener">${file.path}</a>`, bytes(file.bytes), clock(file.modified)])} classOf=${(_, at) => (at ? "muted" : "")} />
    ${shown.length > 500 && html`<p class="muted">${number(shown.length - 500)} more: search for them</p>`}
  </div>`;
}

function Stop({ run }) {
  const said = ({ kill_after_s: limit }) => showMessage(`Stopping after a checkpoint; the run is killed if that takes longer than ${duration(limit)}`);
  const stop = () => post(runPath(run.id, "/stop")).then(said, showError);
  const why = run.stopping ? `stopping: a checkpoint first, ended after ${duration(studio.value?.kill_after_s)} at the latest` : "";
  return html`<${Button} kind="danger" why=${why} onClick=${stop}>${run.stopping ? "Stopping…" : "Stop"}<//>`;
}

function Resume({ run, detail }) {
  if (isGoing(run) || !detail?.resumable) return null;
  const longer = run.status === "completed";
  const text = longer ? "More epochs…" : detail.checkpoints.length ? `Resume from step ${number(newestStep(detail))}…` : "Start again…";
  return html`<${Button} kind=${longer ? "" : "primary"} onClick=${() => openDialog(ResumeDialog, { run, detail })}>${text}<//>`;
}

const TABS = [["overview", "Overview"], ["charts", "Charts"], ["log", "Log"], ["evaluation", "Evaluation"], ["configuration", "Configuration"], ["files", "Files"]];

function Overview({ run, detail }) {
  const [data] = useRuns([run.id]);
  return html`
    ${run.status in ENDS && html`<${Ended} run=${run} detail=${detail} />`}
    <${Summary} run=${run} detail=${detail} data=${data} />
    <${Curves} key=${run.id} id=${run.id} few />
    <div class="card"><h2>Run</h2><${Facts} run=${run} /></div>
  `;
}

function Chosen({ run }) {
  const { found: detail, error } = useAnswer(runPath(run.id), [run.status, run.attempt, run.starting, run.epoch, run.error]);
  const tab = TABS.some(([id]) => id === route.value.tab) ? route.value.tab : "overview";
  const metric = monitored(run);
  const doing = run.status === "running" && run.progress !== null ? `${percent(run.progress)} ` : "";
  useEffect(() => void (document.title = `${doing}${label(run)} – Lockstep studio`), [doing, run.name]);
  return html`<section class="run-page" aria-label="State">
    <div class="run-head">
      <a class="button quiet small" href=${address("runs")}>← Runs</a>
      <h1 class="clip" title=${run.id}>${label(run)}</h1>
      <${Badge} status=${run.status} />
      ${isGoing(run) && html`<${Stop} run=${run} />` /* nothing else comes to its place when the run has ended */}
      ${metric && tab !== "overview" && html`<span class="number muted clip">${heading(metric[0])} <strong>${number(metric[1])}</strong></span>`}
      ${run.tags.map((tag) => html`<${Tag} key=${tag} tag=${tag} />`)}
      <span class="grow"></span>
      <${Resume} run=${run} detail=${detail} />
      <${Menu} label=${`Actions for ${label(run)}`} items=${actionsFor(run)} />
    </div>
    <${Tabs} label="Run" tabs=${TABS} chosen=${tab} onChoose=${(name) => go("run", [run.id], name)} panel="run" />
    <div class="scroll" id="run" role="tabpanel" tabindex="0" aria-labelledby=${`run-tab-${tab}`}>
      <div class="state">
        <p class="unseen" role="status">${label(run)}: ${run.status}</p>
        <${Problem} error=${error} />
        <${Boundary} key=${`${run.id} ${tab}`}>
          ${tab === "overview" && html`<${Overview} run=${run} detail=${detail} />`}
          ${tab === "charts" && html`<${Curves} key=${run.id} id=${run.id} />`}
          ${tab === "log" && html`<${Log} run=${run} names=${detail?.logs ?? []} />`}
          ${tab === "evaluation" && html`<${Evaluation} run=${run} detail=${detail} />`}
          ${tab === "configuration" && html`<${Settings} run=${run} detail=${detail} />`}
          ${tab === "files" && html`<${Files} run=${run} />`}
        <//>
      </div>
    </div>
  </section>`;
}

export function Run() {
  const { run: id } = route.value;
  if (runs.value === null) return html`<p class="empty" role="status">Loading the run…</p>`;
  const run = findRun(id);
  if (!run) return html`<div class="empty stack"><p>There is no run ${id} here; it may have been deleted.</p><p><a class="button" href=${address("runs")}>All runs</a></p></div>`;
  return html`<${Chosen} key=${run.id} run=${run} />`;
}
