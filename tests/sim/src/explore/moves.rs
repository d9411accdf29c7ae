//! What may happen next, and what becomes of it.

use dormouse_core::event::{Answer, Cause, Event, Got, ReplicaProblem, StoreProblem, Wrote};
use dormouse_core::ids::{BoxName, Txid};
use dormouse_core::time::SECOND_NS;

use super::state::{Ask, Break, File, Flight, Machine, SLOT, Stage, State, To, Told};

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// A request is carried out and answered.
    Deliver(u8),
    /// A request is lost: its sender sees a time-out.
    LoseRequest(u8),
    /// It is carried out, and its answer is lost.
    LoseAnswer(u8),
    /// It may land at any later moment; its sender sees a time-out.
    Delay(u8),
    /// A late write lands.
    Land(u8),
    /// Somebody asks for the host.
    Request(u8),
    /// The instance commits.
    Commit(u8),
    /// The replica sends what is not durable.
    Upload(u8),
    /// An operator puts it to sleep.
    Rest(u8),
    /// An operator says that the other box is gone.
    TakeOver(u8),
    /// `kill -9` of the activator.
    Kill(u8),
    /// Power goes: activator and instance.
    Crash(u8),
    /// A new activator.
    Start(u8),
    /// SIGSTOP: of all its processes, or of the activator alone.
    Pause(u8, bool),
    /// SIGCONT.
    Resume(u8),
    /// A core that is due is swept.
    Sweep(u8),
    /// Time passes: to the next due moment, at most a second.
    Wait,
}

impl State {
    /// Everything that may happen now.
    #[must_use]
    pub fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        let faults = self.left.faults > 0;
        for (i, flight) in (0..).zip(&self.flights) {
            moves.push(Move::Deliver(i));
            if faults {
                moves.push(Move::LoseRequest(i));
                if matches!(flight.ask, Ask::Put(..) | Ask::PutFile(_)) {
                    moves.push(Move::LoseAnswer(i));
                    moves.push(Move::Delay(i));
                }
            }
        }
        moves.extend((0..).zip(&self.late).map(|(i, _)| Move::Land(i)));
        for (b, machine) in (0..).zip(&self.boxes) {
            self.moves_of(b, machine, faults, &mut moves);
        }
        let due = moves.iter().any(|step| matches!(step, Move::Sweep(_)));
        if self.flights.is_empty() && !due && self.now_ns < self.end_ns {
            moves.push(Move::Wait);
        }
        moves
    }

    fn moves_of(&self, b: u8, machine: &Machine, faults: bool, moves: &mut Vec<Move>) {
        if self.left.commits > 0 && machine.instance.is_some() && machine.paused != Some(true) {
            moves.push(Move::Commit(b));
        }
        let Some(core) = &machine.core else {
            moves.push(Move::Start(b));
            return;
        };
        if machine.paused.is_some() {
            moves.push(Move::Resume(b));
            return;
        }
        if self.left.requests > 0 {
            moves.push(Move::Request(b));
        }
        let state = core.host(SLOT).map_or("", |view| view.state);
        if self.left.rests > 0 && state == "awake" {
            moves.push(Move::Rest(b));
        }
        if self.left.takeovers > 0 && self.boxes[usize::from(1 - b)].core.is_none() {
            moves.push(Move::TakeOver(b));
        }
        if self.can_upload(machine) {
            moves.push(Move::Upload(b));
        }
        if core.next_due(self.now()).is_some_and(|due| due <= self.now().mono) {
            moves.push(Move::Sweep(b));
        }
        if faults {
            moves.extend([
                Move::Kill(b),
                Move::Crash(b),
                Move::Pause(b, true),
                Move::Pause(b, false),
            ]);
        }
    }

    fn can_upload(&self, machine: &Machine) -> bool {
        let Stage::Running(running) = &machine.stage else { return false };
        let may = machine.deadline.is_some_and(|deadline| !deadline.passed(self.now()));
        let behind = running.based.as_ref() != machine.disk.copy.as_ref();
        may && running.attached && !running.in_flight && (behind || running.file.is_some())
    }

    /// One move.
    pub fn go(&mut self, step: Move) {
        match step {
            Move::Deliver(i) => {
                let flight = self.flights.remove(usize::from(i));
                let told = self.carry(&flight.ask);
                self.tell(flight, told);
            }
            Move::LoseRequest(i) => {
                self.left.faults -= 1;
                let flight = self.flights.remove(usize::from(i));
                self.time_out(flight);
            }
            Move::LoseAnswer(i) => {
                self.left.faults -= 1;
                let flight = self.flights.remove(usize::from(i));
                self.carry(&flight.ask);
                self.time_out(flight);
            }
            Move::Delay(i) => {
                self.left.faults -= 1;
                let flight = self.flights.remove(usize::from(i));
                self.late.push(flight.clone());
                self.time_out(flight);
            }
            Move::Land(i) => {
                let flight = self.late.remove(usize::from(i));
                self.carry(&flight.ask);
            }
            Move::Request(b) => {
                self.left.requests -= 1;
                self.step(usize::from(b), Event::Requested(SLOT, Cause::Client));
            }
            Move::Commit(b) => self.commit(usize::from(b)),
            Move::Upload(b) => self.upload(usize::from(b)),
            Move::Rest(b) => {
                self.left.rests -= 1;
                self.step(usize::from(b), Event::Rest(SLOT));
            }
            Move::TakeOver(b) => {
                self.left.takeovers -= 1;
                self.step(usize::from(b), Event::Takeover(BoxName(format!("box{}", 1 - b))));
            }
            Move::Kill(b) => self.die(usize::from(b), false),
            Move::Crash(b) => self.die(usize::from(b), true),
            Move::Start(b) => self.start(usize::from(b)),
            Move::Pause(b, whole) => {
                self.left.faults -= 1;
                self.boxes[usize::from(b)].paused = Some(whole);
            }
            Move::Resume(b) => self.resume(usize::from(b)),
            Move::Sweep(b) => self.step(usize::from(b), Event::Sweep(Vec::new())),
            Move::Wait => self.wait(),
        }
        self.guard();
    }

    /// The guards' timers go off before anything else at that moment.
    fn guard(&mut self) {
        if !self.automatic || self.sabotage == Some(Break::GuardOmitted) {
            return;
        }
        let now = self.now();
        for b in 0..2 {
            let machine = &mut self.boxes[b];
            let over = machine.deadline.is_some_and(|deadline| deadline.passed(now));
            if over && machine.paused != Some(true) && machine.instance.is_some() {
                self.instance_ends(b);
            }
        }
    }

    fn wait(&mut self) {
        let now = self.now();
        let second = now.mono.0 + SECOND_NS;
        let awake = self.boxes.iter().filter(|machine| machine.paused.is_none());
        let dues = awake.filter_map(|machine| machine.core.as_ref()?.next_due(now));
        let deadlines = self.boxes.iter().filter_map(|machine| Some(machine.deadline?.mono));
        let next = dues.chain(deadlines).map(|at| at.0).filter(|at| *at > now.mono.0).min();
        self.now_ns = next.unwrap_or(second).min(second);
    }

    fn die(&mut self, b: usize, crash: bool) {
        self.left.faults -= 1;
        let machine = &mut self.boxes[b];
        machine.core = None;
        machine.paused = None;
        machine.stage = Stage::Nothing;
        if crash {
            machine.instance = None;
            machine.overthrown = false;
            machine.deadline = None;
        }
        // What it has sent may still land.
        let (gone, stay): (Vec<Flight>, Vec<Flight>) =
            self.flights.drain(..).partition(|flight| flight.b == b);
        self.flights = stay;
        let writes = |flight: &Flight| matches!(flight.ask, Ask::Put(..) | Ask::PutFile(_));
        self.late.extend(gone.into_iter().filter(writes));
    }

    fn resume(&mut self, b: usize) {
        self.boxes[b].paused = None;
        // The guard goes on first, then the activator hears what came meanwhile.
        self.guard();
        for event in std::mem::take(&mut self.boxes[b].mailbox) {
            self.step(b, event);
        }
        for (to, ask, told) in std::mem::take(&mut self.boxes[b].told) {
            self.hear(b, &to, &ask, told);
        }
    }

    fn commit(&mut self, b: usize) {
        self.left.commits -= 1;
        self.writes += 1;
        let write = self.writes;
        self.boxes[b].disk.copy.get_or_insert_default().push(write);
    }

    /// Sends the file that is not definite, or the next one.
    pub(super) fn upload(&mut self, b: usize) {
        let life = self.boxes[b].life;
        let machine = &mut self.boxes[b];
        let content = machine.disk.copy.clone().unwrap_or_default();
        let Stage::Running(running) = &mut machine.stage else { return };
        let file = running.file.get_or_insert_with(|| {
            let txid = running.tip.as_ref().map_or(Txid(0), |tip| tip.txid).next();
            let nonce = format!("f{b}.{life}.{}.{txid}", running.number).as_str().into();
            File { txid, nonce, content, parent: running.based.clone() }
        });
        machine.disk.spool.insert((file.txid, file.nonce.clone()));
        machine.disk.unsent = Some(file.clone());
        running.in_flight = true;
        let (ask, to) = (Ask::PutFile(file.clone()), To::Upload(running.number));
        self.flights.push(Flight { b, life, ask, to });
    }

    /// The store does what is asked.
    fn carry(&mut self, ask: &Ask) -> Told {
        match ask {
            Ask::Get(key) => {
                let found = self.store.records.get(key);
                Told::Got(found.map_or(Got::Absent, |record| Got::Found {
                    body: record.value.clone(),
                    etag: record.etag.clone(),
                    age: Some(dormouse_core::time::Nanos(self.now_ns - record.written)),
                }))
            }
            Ask::Put(key, body, expect) => Told::Wrote(self.put_record(key, body, expect)),
            Ask::List => Told::Newest(self.newest()),
            Ask::Read => Told::Read(match self.restore() {
                Ok(Some(restored)) => Ok(restored),
                Ok(None) => Err("nothing".into()),
                Err(why) => Err(why),
            }),
            Ask::ReadOne(txid) => {
                let found = self.store.files.get(txid);
                Told::One(found.map(|file| (file.value.clone(), file.etag.clone())))
            }
            Ask::PutFile(file) => Told::File(self.put_file(file)),
        }
    }

    fn tell(&mut self, flight: Flight, told: Told) {
        let Flight { b, life, ask, to } = flight;
        let machine = &mut self.boxes[b];
        if machine.life != life || machine.core.is_none() {
            return;
        }
        if machine.paused.is_some() {
            machine.told.push((to, ask, told));
        } else {
            self.hear(b, &to, &ask, told);
        }
    }

    fn time_out(&mut self, flight: Flight) {
        self.tell(flight, Told::Nothing);
    }

    fn hear(&mut self, b: usize, to: &To, ask: &Ask, told: Told) {
        match *to {
            To::Core(ticket) => {
                let answer = self.core_answer(ask, told);
                self.step(b, Event::Answer(ticket, answer));
            }
            To::Restore(ticket) => self.restored(b, ticket, told),
            To::Apply(ticket) => self.applied(b, ticket, told),
            To::Fence(ticket) => self.fence_told(b, ticket, told),
            To::Upload(number) => self.upload_told(b, number, told),
        }
    }

    fn core_answer(&self, ask: &Ask, told: Told) -> Answer {
        let problem = StoreProblem::Unreachable("no answer".into());
        match (told, ask) {
            (Told::Wrote(Wrote::ConditionFailed), Ask::Put(key, ..))
                if self.sabotage == Some(Break::NonceUnchecked) =>
            {
                let found = self.store.records.get(key);
                let etag = found.map(|record| record.etag.clone());
                Answer::Wrote(etag.map_or(Wrote::ConditionFailed, Wrote::Done))
            }
            (Told::Got(got), _) => Answer::Got(got),
            (Told::Wrote(wrote), _) => Answer::Wrote(wrote),
            (Told::Newest(newest), _) => Answer::Listed(Ok(newest)),
            (_, Ask::Put(..)) => Answer::Wrote(Wrote::Unknown),
            (_, Ask::List) => Answer::Listed(Err(ReplicaProblem::Store(problem))),
            (_, _) => Answer::Got(Got::Failed(problem)),
        }
    }
}
