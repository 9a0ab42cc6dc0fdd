//! What a use of a smart bucket allocates: nothing. In a binary of its own, as it counts what the
//! process allocates.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::time::Duration;

use tollgate_client::{Fake, FakeAnswer};

#[tokio::test]
async fn a_use_of_a_smart_bucket_allocates_nothing() {
    let client = Fake::new(FakeAnswer::Grant).client().build().unwrap();
    let bucket = client.smart_bucket("a", "b").build();
    for _ in 0..100 {
        let mut used = 0;
        let allocated = allocation_counter::measure(|| {
            for _ in 0..100 {
                used += u32::from(bucket.try_acquire(1));
            }
        });
        // Not before enough is there.
        if used == 100 {
            assert_eq!(allocated.count_total, 0);
            return;
        }
        bucket.acquire(300, Duration::from_secs(20)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("there were never a hundred tokens");
}
