//! Bad arguments are refused before anything is sent, and said to be wrong on stderr.

use crate::common::run;

#[test]
fn bad_arguments_exit_with_2_and_a_reason() {
    for (args, reason) in [
        ("", "Usage"),
        ("alow", "allow"),
        (
            "allow --target https://a:1",
            "https://a:1 needs TLS: name the CA certificates with --ca-file",
        ),
        ("allow --target http://a:1/b", "is not a valid address: write HOST:PORT"),
        ("allow --duration ten", "--duration"),
        ("allow --duration 0s", "--duration must be above 0"),
        ("allow --duration 10years", "30 days"),
        ("allow --timeout 0s", "--timeout must be above 0"),
        ("allow --connections 0", "--connections"),
        ("allow --in-flight 0", "--in-flight"),
        ("allow --threads 8", "raise --connections"),
        ("allow --rate 0", "--rate"),
        ("allow --rate nan", "expected a number above 0"),
        ("allow --rate 10 --in-flight 3", "cannot be used with"),
        ("allow --rate 10 --honour-wait", "cannot be used with"),
        ("allow --rate 10 --arrivals never", "uniform, poisson"),
        ("allow --rate 10 --threads 2 --max-outstanding 1", "raise --max-outstanding"),
        ("allow --arrivals poisson", "--rate"),
        ("allow --max-outstanding 9", "--rate"),
        ("allow --keys cold", "expected hot, uniform:N"),
        ("allow --keys zipf:0", "no number of keys"),
        ("allow --keys uniform:9 --bucket b", "--bucket-prefix"),
        ("allow --bucket-prefix b", "--bucket"),
        ("allow --tokens 0", "--tokens"),
        ("allow --size 5", "--fill-rate"),
        ("allow --fill-rate 5", "--size"),
        ("allow --max-debt 5s", "--size"),
        ("allow --limits f --size 5 --fill-rate 5", "cannot be used with"),
        ("allow --limits no/such/file", "can't read no/such/file"),
        ("allow --expect-saturation 0.9", "needs --limits"),
        (
            "allow --expect-saturation 0.9 --keys uniform:5 --size 5 --fill-rate 5",
            "--expect-saturation is for --keys hot",
        ),
        ("throttle", "--resource"),
        ("throttle --resource r --duration 0s", "--duration must be above 0"),
        ("throttle --resource r --threads 8", "raise --connections"),
        ("throttle --resource r --rate 10 --honour-wait", "cannot be used with"),
        ("throttle --resource r --keys uniform:9 --domain d", "--domain-prefix"),
        ("throttle --resource r --domain-prefix d", "name the hot domain with --domain"),
        ("throttle --resource r --copies 0", "--copies"),
        ("throttle --resource r --min-copies 2", "--min-copies is more than --copies"),
        ("throttle --resource r --limits no/such/file", "can't read no/such/file"),
        ("holds", "--resource"),
        ("holds --resource r --clients 0", "--clients"),
        ("holds --resource r --min-copies 2", "--min-copies is more than --copies"),
        ("holds --resource r --ttl 1ms", "--ttl must be from 100ms to 1day"),
        ("holds --resource r --hold-for 10years", "--hold-for must be at most 30 days"),
        ("holds --resource r --keys uniform:9 --domain d", "--domain-prefix"),
        ("holds --resource r --limits no/such/file", "can't read no/such/file"),
        ("capacity --clients 0", "--clients"),
        ("capacity --duration 0s", "--duration must be above 0"),
        ("capacity --warmup 10years", "30 days"),
        ("capacity --timeout 0s", "--timeout must be above 0"),
        ("capacity --wants=-1", "expected a number of at least 0"),
        ("capacity --resources 2 --resource-pattern db", "--resource-pattern needs {}"),
        ("capacity --resources-per-client 2", "more than there are --resources"),
        ("capacity --jump 2", "--jump-at"),
        ("capacity --jump-at 5s", "--jump"),
        ("capacity --jump-at 60s --jump 2", "--jump-at must be less than --duration"),
        ("capacity --converged-at 2", "--converged-at is a share"),
        ("capacity --allow-overshoot 2", "--capacity"),
        ("bench --rounds 0", "--rounds"),
        ("bench --seconds 0", "expected a number above 0"),
        ("bench --only nothing-of-the-kind", "nothing has any --only in its name"),
        ("floor --listen here", "--listen"),
        ("scenario", "<NAME>"),
        ("scenario two", "one, five, seven"),
        ("scenario one --duration 0s", "--duration must be above 0"),
        ("scenario one --algorithm none", "proportional-share, fair-share"),
    ] {
        let run = run(args);
        assert_eq!(run.code, 2, "{args}: {run:?}");
        assert!(run.stderr.contains(reason), "{args}: {}", run.stderr);
        assert_eq!(run.stdout, "", "{args}");
    }
}

fn help_names(command: &str, options: &[&str]) {
    let run = run(&format!("{command} --help"));
    assert_eq!(run.code, 0, "{run:?}");
    for option in options {
        assert!(run.stdout.contains(&format!("--{option}")), "{command} {option}");
    }
}

#[test]
fn help_explains_every_option() {
    help_names(
        "allow",
        &[
            "target",
            "duration",
            "warmup",
            "connections",
            "in-flight",
            "honour-wait",
            "rate",
            "arrivals",
            "max-outstanding",
            "timeout",
            "threads",
            "namespace",
            "keys",
            "bucket",
            "bucket-prefix",
            "tokens",
            "max-wait",
            "seed",
            "limits",
            "size",
            "fill-rate",
            "max-debt",
            "expect-saturation",
            "progress",
            "json",
        ],
    );
    help_names(
        "throttle",
        &[
            "target",
            "token-file",
            "duration",
            "warmup",
            "connections",
            "in-flight",
            "honour-wait",
            "rate",
            "arrivals",
            "max-outstanding",
            "timeout",
            "threads",
            "resource",
            "keys",
            "domain",
            "domain-prefix",
            "copies",
            "min-copies",
            "seed",
            "limits",
            "progress",
            "json",
        ],
    );
    help_names(
        "holds",
        &[
            "target",
            "token-file",
            "duration",
            "warmup",
            "connections",
            "timeout",
            "clients",
            "resource",
            "keys",
            "domain",
            "domain-prefix",
            "copies",
            "min-copies",
            "ttl",
            "hold-for",
            "seed",
            "limits",
            "progress",
            "json",
        ],
    );
    help_names(
        "capacity",
        &[
            "target",
            "duration",
            "warmup",
            "connections",
            "max-outstanding",
            "timeout",
            "clients",
            "client-prefix",
            "resources",
            "resource-pattern",
            "resources-per-client",
            "wants",
            "step",
            "refresh-every",
            "jump-at",
            "jump",
            "converged-at",
            "converged-for",
            "capacity",
            "allow-overshoot",
            "keep-leases",
            "seed",
            "progress",
            "json",
        ],
    );
    help_names(
        "bench",
        &[
            "rounds", "seconds", "warmup", "only", "buckets", "clients", "threads", "tollgate",
            "json-out", "svg-out", "json",
        ],
    );
    help_names("floor", &["listen", "store"]);
    help_names("scenario", &["seed", "duration", "algorithm", "safe-capacity", "out", "json"]);
}
