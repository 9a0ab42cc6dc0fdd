//! `tollgate-loadtest scenario`: the design document's simulations, against the real service.

use serde_json::Value;

use crate::common::run;

fn report(args: &str) -> Value {
    let run = run(&format!("scenario {args} --json"));
    assert_eq!(run.code, 0, "{run:?}");
    run.json()
}

#[test]
fn one_hands_out_all_there_is_and_never_more() {
    let report = report("one --duration 20m");
    assert!(report["utilisation"].as_f64().unwrap() > 0.985, "{report}");
    assert_eq!(report["shortfalls"]["times"], 0, "{report}");
    assert_eq!((&report["clusters"], &report["clients"]), (&1.into(), &5.into()));
}

#[test]
fn five_hands_out_at_least_what_the_document_says() {
    let report = report("five --duration 1h");
    let document = report["document"]["utilisation_percent"].as_f64().unwrap();
    assert!(report["utilisation"].as_f64().unwrap() * 100.0 > document, "{report}");
    assert_eq!(report["shortfalls"]["times"], 0, "{report}");
    assert_eq!((&report["clusters"], &report["clients"]), (&13.into(), &45.into()));
}

#[test]
fn seven_hands_out_no_more_than_there_is_through_all_its_mishaps() {
    for seed in 1..=3 {
        // Without a lease nothing is safe, so that all that is handed out is the root's.
        let report = report(&format!("seven --seed {seed} --safe-capacity 0"));
        assert!(report["utilisation"].as_f64().unwrap() > 0.965, "{report}");
        assert_eq!(report["shortfalls"]["times"], 0, "{report}");
        assert_eq!(report["mishaps"].as_object().unwrap().len(), 3);
        assert!(report["failed"].as_u64().unwrap() > 0);
    }
}

#[test]
fn seven_falls_short_less_often_and_by_less_than_the_document_says() {
    let report = report("seven --seed 20");
    let document = &report["document"];
    let times = report["shortfalls"]["times"].as_u64().unwrap();
    assert!(times < document["shortfalls"].as_u64().unwrap(), "{report}");
    let most = report["shortfalls"]["max"].as_f64().unwrap_or(0.0);
    assert!(most <= document["max"].as_f64().unwrap(), "{report}");
    let used = document["utilisation_percent"].as_f64().unwrap();
    assert!(report["utilisation"].as_f64().unwrap() * 100.0 > used, "{report}");
}

#[test]
fn a_seed_gives_the_same_hour_again() {
    let of = |seed: u64| {
        let mut report = report(&format!("seven --duration 10m --seed {seed}"));
        report["took_s"] = Value::Null;
        report
    };
    assert_eq!(of(7), of(7));
    assert_ne!(of(7)["mean_has"], of(8)["mean_has"]);
}

#[test]
fn a_plot_and_a_text_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("five.svg");
    let plain = run(&format!("scenario five --duration 5m --out {}", path.display()));
    assert_eq!(plain.code, 0, "{plain:?}");
    assert!(plain.stdout.contains("(design document: 96.8 %)"), "{plain:?}");
    assert!(plain.stdout.contains("shortfalls   0, "), "{plain:?}");
    let svg = std::fs::read_to_string(&path).unwrap();
    assert!(svg.contains("Scenario five: 45 clients") && svg.ends_with("</svg>\n"));

    let path = folder.path().join("no/such/folder.svg");
    let failed = run(&format!("scenario one --duration 1m --out {}", path.display()));
    assert_eq!(failed.code, 2);
    assert!(failed.stderr.contains("can't write"), "{failed:?}");
}
